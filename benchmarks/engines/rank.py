"""One rank of one engine: takes steps, measures them, and looks at what is in them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardgrad.ops
from benchmarks.engines.catalogue import ENGINES
from benchmarks.engines.program import COMPUTE_DTYPES, MicroBatch, Trained, micro_batches
from benchmarks.engines.trace import (
    Observation,
    Traffic,
    launches,
    trace,
    traffic,
)
from benchmarks.measure import Cost, cost_of, proc_nbytes, settle
from benchmarks.models import facts_of
from benchmarks.workers import Worker

_MATMUL_WIDTH = 1024


class Rank:
    """An engine's part on this rank.

    Args:
        worker: this process; its argument is the engine's name and the task.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        name, self._task = worker.argument
        self._device = worker.join()
        self._control = dist.new_group(backend="gloo")
        self._baseline_rss_nbytes = proc_nbytes("/proc/self/status", "VmHWM")
        self._losses: list[Tensor] = []
        self._traffic: dict[str, Traffic] = {}
        self._facts = facts_of(self._task.preset)
        self._data: Iterator[list[MicroBatch]] = cycle(
            micro_batches(self._task, worker.rank, self._facts.vocab_size, self._device)
        )
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._trained: Trained = resolve_name(ENGINES[name].build)(self._task, self._device)

    def warm_up(self, steps: int) -> list[float]:
        """Takes steps and returns their losses."""
        for number in range(steps):
            # On a device, where a later step may be a graph, the second eager step shows what is
            # sent.
            if number == 1 and self._device.type != "cpu":
                self._traffic = self._traffic_of(trace(self._step, self._device))
            else:
                self._step()
        settle()
        return self.losses()

    def losses(self) -> list[float]:
        """All losses so far: means over this rank's micro-batches."""
        return [float(loss) for loss in self._losses]

    def turn(self, steps: int) -> Cost:
        """Times steps, on all ranks at once. On a device, `host_s` is that of one more, while it is
        idle.
        """
        device = self._device.type
        cost = cost_of(self._step, repeats=steps, device=device, barrier=self._barrier)
        if device == "cpu":
            return cost
        return dataclasses.replace(cost, host_s=cost_of(self._step, device=device).host_s)

    def observe(self) -> Observation:
        """Looks at memory first, then at a step that is not timed."""
        peak_rss = proc_nbytes("/proc/self/status", "VmHWM")
        allocated = reserved = None
        if self._device.type == "cuda":
            allocated, reserved = (
                torch.cuda.max_memory_allocated(),
                torch.cuda.max_memory_reserved(),
            )
        # Beside the log.
        kept = Path(self._worker.log or "").with_suffix(".trace.json")
        events = trace(self._step, self._device, kept if self._worker.rank == 0 else None)
        return Observation(
            baseline_rss_nbytes=self._baseline_rss_nbytes,
            peak_rss_nbytes=peak_rss,
            peak_allocated_nbytes=allocated,
            peak_reserved_nbytes=reserved,
            pool_nbytes=self._trained.pool_nbytes(),
            launches=None if self._device.type == "cpu" else launches(events),
            traffic=self._traffic or self._traffic_of(events),
        )

    def hardware(self) -> dict[str, Any]:
        """What this rank computes on, with which libraries, and the rate of its matrix products.

        The rate is FLOP/s of a 1024 x 1024 product in the task's precision, on all ranks at once:
        what a share of the peak can be taken of where nobody publishes one.
        """
        dtype = COMPUTE_DTYPES[self._task.precision]
        matrix = torch.randn(_MATMUL_WIDTH, _MATMUL_WIDTH, device=self._device).to(dtype)
        repeats = 3 if self._device.type == "cpu" else 20
        costs = [
            cost_of(
                lambda: matrix @ matrix,
                repeats=repeats,
                device=self._device.type,
                barrier=self._barrier,
            )
            for _ in range(4)
        ]
        facts: dict[str, Any] = {
            "ops_backend": shardgrad.ops.backend(),
            "matmul_flops_per_s": 2 * _MATMUL_WIDTH**3 / min(cost.wall_s for cost in costs[1:]),
            "threads_per_rank": torch.get_num_threads(),
            "cores_per_rank": len(os.sched_getaffinity(0)),
            "model": dataclasses.asdict(self._facts),
        }
        if self._device.type == "cuda":
            facts["device_name"] = torch.cuda.get_device_name(self._device)
            facts["device_nbytes"] = torch.cuda.get_device_properties(self._device).total_memory
            facts["cuda"] = torch.version.cuda
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        return facts

    def _step(self) -> None:
        self._losses.append(self._trained.step(next(self._data)).detach().clone())

    def _barrier(self) -> None:
        dist.barrier(self._control)

    def _traffic_of(self, events: list[dict[str, Any]]) -> dict[str, Traffic]:
        shape = self._task.mesh_shape
        shards, replicas = shape[-1], shape[0] if len(shape) > 1 else 1
        return traffic(events, rank=self._worker.rank % shards, shards=shards, replicas=replicas)
