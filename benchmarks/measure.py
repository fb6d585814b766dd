"""The one way in which costs are measured: in turns, round by round, and compared within a round.

Everything that is compared runs in the same round, in an order that reverses from round to round,
so that what slows the machine down for a while slows down all of it. A ratio is taken round by
round; what is reported is the median of these ratios, and their quartiles.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Work = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """Of one repetition, on one rank.

    Attributes:
        wall_s: seconds on the clock, until the device has done it.
        cpu_s: seconds of all threads of the process, gloo's included.
        loopback_nbytes: received on the loopback interface, by every process of the machine.
        host_s: seconds until the host had asked for it; on a CPU the same as `wall_s`.
    """

    wall_s: float
    cpu_s: float
    loopback_nbytes: float = 0.0
    host_s: float = 0.0


def settle() -> None:
    """Takes what lives now out of garbage collection: a pass over torch's objects takes as long as
    a step.
    """
    gc.collect()
    gc.freeze()


def cost_of(
    work: Work, *, repeats: int = 1, device: str = "cpu", barrier: Work = lambda: None
) -> Cost:
    """Measures `work`; with a barrier, on all ranks at once."""
    gc.collect()  # garbage of the work before is not a cost of this one
    synchronize(device)
    barrier()
    nbytes = loopback_nbytes()
    barrier()  # no rank sends before all have read the counter
    cpu_s = time.process_time()
    began_s = time.perf_counter()
    for _ in range(repeats):
        work()
    host_s = time.perf_counter() - began_s
    synchronize(device)
    wall_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - cpu_s
    barrier()
    nbytes = loopback_nbytes() - nbytes
    return Cost(*(value / repeats for value in (wall_s, cpu_s, nbytes, host_s)))


def synchronize(device: str) -> None:
    """Waits until an accelerator has nothing left to do."""
    if device != "cpu":
        import torch

        torch.accelerator.synchronize()


def in_turn(names: Sequence[str], number: int) -> Sequence[str]:
    """The order in which `names` have their turns in round `number`."""
    return names if number % 2 == 0 else names[::-1]


def interleaved(
    works: Mapping[str, Work],
    rounds: int,
    *,
    repeats: int | Mapping[str, int] = 1,
    device: str = "cpu",
    barrier: Work = lambda: None,
) -> dict[str, list[Cost]]:
    """Measures works in turns, after a repetition of each.

    Args:
        works: by name.
        rounds: in each of them every work has a turn.
        repeats: of a work in its turn; the same for all, or by name.
        device: `cpu`, or the type of an accelerator.
        barrier: for works of several ranks.

    Returns:
        The costs by name, one for each round.
    """
    for work in works.values():
        work()
    settle()
    costs: dict[str, list[Cost]] = {name: [] for name in works}
    for number in range(rounds):
        for name in in_turn(list(works), number):
            times = repeats if isinstance(repeats, int) else repeats[name]
            costs[name].append(cost_of(works[name], repeats=times, device=device, barrier=barrier))
    return costs


def over_ranks(results: Sequence[Any]) -> Any:
    """The costs to the world from each rank's: `Cost`, lists of it, or dictionaries of either, all
    alike.

    The slowest rank's time; a rank's mean CPU time.
    """
    first = results[0]
    if isinstance(first, Mapping):
        return {key: over_ranks([one[key] for one in results]) for key in first}
    if isinstance(first, list):
        return [over_ranks(costs) for costs in zip(*results, strict=True)]
    return Cost(
        wall_s=max(cost.wall_s for cost in results),
        cpu_s=statistics.fmean(cost.cpu_s for cost in results),
        loopback_nbytes=first.loopback_nbytes,  # every rank read the same counter
        host_s=max(cost.host_s for cost in results),
    )


# -- from costs to records


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, as a record has them; two samples at least."""
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "quartiles": [low, high]}


def ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round, so that what slows a whole round down cancels out."""
    return [sample / other for sample, other in zip(samples, base, strict=True)]


def samples_of(costs: Mapping[str, Sequence[Cost]], *fields: str) -> dict[str, Any]:
    """Fields of costs, one value for each round.

    Args:
        costs: by name.
        *fields: of `Cost`.
    """
    return {
        name: {field: [getattr(cost, field) for cost in of] for field in fields}
        for name, of in costs.items()
    }


def summarize(costs: Mapping[str, Sequence[Cost]], base: str, *fields: str) -> dict[str, Any]:
    """Spreads of fields of costs, and of the ratios of times to those of `base` in the same round.

    Args:
        costs: as for `samples_of`.
        base: a name.
        *fields: as for `samples_of`.
    """
    samples = samples_of(costs, *fields)
    found: dict[str, Any] = {}
    for name, of in samples.items():
        found[name] = {field: spread(values) for field, values in of.items()}
        for number, field in enumerate(one for one in of if one.endswith("_s")):
            prefix = "" if number == 0 else f"{field.removesuffix('_s')}_"
            found[name][f"{prefix}ratio_to_{base}"] = spread(
                ratios(of[field], samples[base][field])
            )
    return found


# -- what Linux counts


def loopback_nbytes() -> int:
    """Bytes that the loopback interface has received since the machine started."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("there is no loopback interface in /proc/net/dev")


def proc_nbytes(path: str, field: str) -> int:
    """A size that Linux tells in KiB.

    Args:
        path: such as `/proc/self/status` or `/proc/meminfo`.
        field: such as `VmRSS`, what is resident now; `VmHWM`, the most that has been (not
            `ru_maxrss`, which a spawned process inherits from its parent); or `MemAvailable`.
    """
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"there is no {field} in {path}")
