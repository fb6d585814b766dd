"""What a piece of work costs: wall time, CPU time, page faults, bytes on the loopback interface."""

from __future__ import annotations

import dataclasses
import gc
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cost:
    """Of one repetition, on one rank.

    Attributes:
        wall_s: seconds on the clock.
        cpu_s: seconds of all threads of the process, gloo's included.
        minor_faults: pages mapped without disk.
        loopback_nbytes: received on the loopback interface, by every process of the machine.
    """

    wall_s: float
    cpu_s: float
    minor_faults: float
    loopback_nbytes: float


def settle() -> None:
    """Takes what lives now out of garbage collection: a pass over torch's objects takes as long as a step."""
    gc.collect()
    gc.freeze()


def cost_of(
    work: Callable[[], object], *, repeats: int, barrier: Callable[[], object] = lambda: None
) -> Cost:
    """Measures `work`; with a barrier, on all ranks at once."""
    gc.collect()  # what an earlier contestant left behind is not this one's cost
    barrier()
    nbytes = loopback_nbytes()
    barrier()  # nobody sends before everybody has read the counter
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cpu_s = time.process_time()
    wall_s = time.perf_counter()
    for _ in range(repeats):
        work()
    wall_s = time.perf_counter() - wall_s
    cpu_s = time.process_time() - cpu_s
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    barrier()
    nbytes = loopback_nbytes() - nbytes
    return Cost(wall_s / repeats, cpu_s / repeats, faults / repeats, nbytes / repeats)


def cost_on(
    device: str, work: Callable[[], object], *, repeats: int, barrier: Callable[[], object] = lambda: None
) -> Cost:
    """Measures `work` until the device has done it. On a GPU only wall time means something."""

    def repeated() -> None:
        for _ in range(repeats):
            work()
        if device != "cpu":
            import torch

            torch.accelerator.synchronize()

    cost = cost_of(repeated, repeats=1, barrier=barrier)
    return Cost(*(value / repeats for value in dataclasses.astuple(cost)))


def over_ranks(costs: Sequence[Cost]) -> Cost:
    """The cost to the world: the slowest rank's wall time; a rank's mean CPU time and faults."""
    return Cost(
        wall_s=max(cost.wall_s for cost in costs),
        cpu_s=statistics.fmean(cost.cpu_s for cost in costs),
        minor_faults=statistics.fmean(cost.minor_faults for cost in costs),
        # Every rank read the same counter; rank 0's reading is as good as any.
        loopback_nbytes=costs[0].loopback_nbytes,
    )


def loopback_nbytes() -> int:
    """Bytes that the loopback interface has received since the machine started."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("there is no loopback interface in /proc/net/dev")


def peak_rss_nbytes() -> int:
    """The most memory this process has had resident.

    Not `ru_maxrss`: a spawned process inherits that from its parent.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("there is no VmHWM in /proc/self/status")


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, ready for a record; two samples at least."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high]}


def ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round, so that what slows a whole round down cancels out."""
    return [sample / other for sample, other in zip(samples, base, strict=True)]
