"""Does anything grow while a model trains for long, or when models are built and deleted?"""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.run import Run, option
from benchmarks.trainer import make_step
from benchmarks.workers import on_ranks
from shardgrad.diagnosis.watchdog import Watchdog
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.optimizer import build_optimizer
from shardgrad.programs.train.parallel import memory_nbytes
from shardgrad.programs.train.sharding import build_model

_MODES = {"eager": ("train", 2), "graphed": ("train_graphed", 1), "models": ("build_and_delete", 2)}
_WARM = 0.2  # of the looks: caches, lazily made buffers, the allocator's arenas
# What a process may hold more at the end than after the warm-up.
_ALLOWED = {
    "resident_nbytes": 8 * 2**20,
    "tensors": 0,
    "objects": 64,
    "descriptors": 0,
    "threads": 0,
}

Looks = list[dict[str, Any]]


@click.command()
@option("--preset", default="tiny", help="Model.")
@option("--steps", type=click.IntRange(40), default=20_000, help="Steps of a training.")
@option("--models", type=click.IntRange(40), default=200, help="Models to build.")
@option(
    "--mode",
    "modes",
    type=click.Choice(list(_MODES)),
    multiple=True,
    help="What to repeat; repeatable.  [default: all]",
)
@click.pass_obj
def main(run: Run, preset: str, steps: int, models: int, modes: Sequence[str]) -> None:
    """Repeat, and compare what every process holds after the warm-up and at the end.

    The exit status is 1 if anything has grown. `graphed` needs a source tree, for the simulated
    accelerator.
    """
    looks = 40
    if run.smoke:
        steps, models, looks = 40, 40, 10
    samples: dict[str, list[Looks]] = {}
    for mode in modes or _MODES:
        function, ranks = _MODES[mode]
        times = models if mode == "models" else steps
        samples[mode] = on_ranks(
            f"benchmarks.soak:{function}", ranks, preset, times, looks, timeout_s=24 * 3600
        )
    summary = {mode: _summary(of) for mode, of in samples.items()}
    run.has_failed |= not all(of["is_flat"] for of in summary.values())
    run.finish(
        "soak",
        config={"preset": preset, "steps": steps, "models": models},
        samples=samples,
        summary=summary,
    )


def _summary(ranks: list[Looks]) -> dict[str, Any]:
    """Growth from the end of the warm-up to the last look, of the rank where it is largest; step
    times.
    """
    found: dict[str, Any] = {
        what: max(_growth([look[what] for look in looks]) for looks in ranks) for what in _ALLOWED
    }
    is_flat = all(found[what] <= most for what, most in _ALLOWED.items())
    times = [look["step_s"] for look in ranks[0][int(_WARM * len(ranks[0])) :]]
    part = max(1, len(times) // 16)  # of 20,000 steps, the first and the last thousand
    first, last = statistics.median(times[:part]), statistics.median(times[-part:])
    return found | {"first_step_s": first, "last_step_s": last, "is_flat": is_flat}


def _growth(values: list[int]) -> int:
    """What was added between the end of the warm-up and the end.

    The smallest of a few looks on either side, since what a look catches in the middle of its life
    is gone at the next.
    """
    warm = values[int(_WARM * len(values)) :]
    side = max(1, len(warm) // 8)
    return min(warm[-side:]) - min(warm[:side])


# -- on the ranks


def _look(step: int, step_s: float) -> dict[str, Any]:
    """What this process holds now, after a collection of garbage."""
    gc.collect()
    # Which free pages the heap keeps depends on the order of all allocations: it would hide a small
    # leak.
    ctypes.CDLL(None).malloc_trim(0)
    objects = gc.get_objects()
    found = {
        "step": step,
        "resident_nbytes": memory_nbytes(torch.device("cpu")),
        "tensors": sum(issubclass(type(each), torch.Tensor) for each in objects),
        "objects": len(objects),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "step_s": step_s,  # median over the steps since the look before
    }
    del objects
    return found


def _repeat(work: Callable[[], object], times: int, looks: int) -> Looks:
    """Does the work so many times, and looks at what is held at regular intervals."""
    seen: Looks = []
    every = max(1, times // looks)
    samples: list[float] = []
    for number in range(1, times + 1):
        began_s = time.perf_counter()
        work()
        samples.append(time.perf_counter() - began_s)
        if number % every == 0:
            seen.append(_look(number, sorted(samples)[len(samples) // 2]))
            samples.clear()
    return seen


def train(preset: str, steps: int, looks: int, device: str = "cpu", graph: str = "off") -> Looks:
    """Trains a preset, with everything that the training program does in a step, and its
    watchdog.
    """
    config = TrainConfig(preset=preset, steps=steps, batch_size=1, seq_len=32, graph=graph)
    store = dist.distributed_c10d._get_default_store()
    watchdog = Watchdog(store, dist.get_rank(), dist.get_world_size()).start()
    step, place = make_step(config, device)

    def work() -> None:
        float(step().loss)
        place.any(False)

    try:
        return _repeat(work, steps, looks)
    finally:
        watchdog.close()


def train_graphed(preset: str, steps: int, looks: int) -> Looks:
    """The same on one rank of the simulated accelerator, where a step is a graph."""
    from tests.simulated.accelerator import device

    device.install()
    dist.destroy_process_group()
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)
    found = train(preset, steps, looks, f"{device.NAME}:0", "on")
    device.reset()
    return found


def build_and_delete(preset: str, times: int, looks: int) -> Looks:
    """Builds a model, takes a step, and deletes it."""
    config = TrainConfig(preset=preset)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(1))

    def work() -> None:
        model = build_model(config, mesh, torch.device("cpu"))
        optimizer = build_optimizer(model, config)
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    return _repeat(work, times, looks)
