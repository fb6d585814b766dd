"""What a soak does in a rank: the same step many times, and what the process holds meanwhile."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Holdings:
    """What a process holds at one moment.

    Attributes:
        step: how many there have been.
        resident_nbytes: memory, without what the C library keeps for the next allocations.
        tensors: alive, as the garbage collector knows them.
        objects: of Python, tracked by the garbage collector.
        descriptors: of open files, sockets and pipes.
        threads: of the operating system.
        step_s: median over the steps since the moment before.
    """

    step: int
    resident_nbytes: int
    tensors: int
    objects: int
    descriptors: int
    threads: int
    step_s: float


def holdings(step: int, step_s: float) -> Holdings:
    """Returns what this process holds now, after a collection of garbage."""
    import torch

    from shardgrad.train.parallel import memory_nbytes

    gc.collect()
    # Which free pages the heap keeps depends on the order of all allocations: it would hide a small leak.
    ctypes.CDLL(None).malloc_trim(0)
    objects = gc.get_objects()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in objects)
    count = len(objects)
    del objects
    return Holdings(
        step,
        memory_nbytes(torch.device("cpu")),
        tensors,
        count,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        step_s,
    )


def repeated(work: Callable[[], object], times: int, looks: int) -> list[dict[str, Any]]:
    """Does the work so many times, and looks at what is held at regular intervals."""
    seen = []
    every = max(1, times // looks)
    samples: list[float] = []
    for number in range(1, times + 1):
        began_s = time.perf_counter()
        work()
        samples.append(time.perf_counter() - began_s)
        if number % every == 0:
            seen.append(dataclasses.asdict(holdings(number, sorted(samples)[len(samples) // 2])))
            samples.clear()
    return seen


def train(preset: str, steps: int, looks: int, device: str, graph: str) -> list[dict[str, Any]]:
    """Trains a preset, with everything that the training program does in a step, and its watchdog."""
    import torch.distributed as dist

    from benchmarks.trainer import make_step
    from shardgrad.diagnosis.hang_watchdog import HangWatchdog
    from shardgrad.train.config import TrainConfig

    config = TrainConfig(preset=preset, steps=steps, batch_size=1, seq_len=32, graph=graph)
    store = dist.distributed_c10d._get_default_store()
    watchdog = HangWatchdog(store, dist.get_rank(), dist.get_world_size()).start()
    step, place = make_step(config, device)

    def work() -> None:
        float(step().loss)
        place.any(False)

    try:
        return repeated(work, steps, looks)
    finally:
        watchdog.close()


def train_graphed(preset: str, steps: int, looks: int) -> list[dict[str, Any]]:
    """The same on one rank of the simulated accelerator, where a step is a graph."""
    import torch
    import torch.distributed as dist

    from tests.simulated.accelerator import device

    device.install()
    dist.destroy_process_group()
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("cpu:gloo", store=store, rank=0, world_size=1)
    # Nobody asks for hazards here, so what was launched need not be remembered.
    forget = device.reset
    found = train(preset, steps, looks, f"{device.NAME}:0", "on")
    forget()
    return found


def build_and_delete(preset: str, times: int, looks: int) -> list[dict[str, Any]]:
    """Builds a model, takes a step, and deletes it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from shardgrad.train.config import TrainConfig
    from shardgrad.train.optimizer import build_optimizer
    from shardgrad.train.sharding import build_model

    config = TrainConfig(preset=preset)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(1))

    def work() -> None:
        model = build_model(config, mesh, torch.device("cpu"))
        optimizer = build_optimizer(model, config)
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    return repeated(work, times, looks)
