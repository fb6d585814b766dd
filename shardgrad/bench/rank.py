"""One rank of one contestant: joins its group, and does what it is told until it is told no more."""

from __future__ import annotations

import dataclasses
import os
import textwrap
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain, cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardgrad.bench.batches import MicroBatch, micro_batches
from shardgrad.bench.catalogue import CATALOGUE
from shardgrad.bench.contestants import build
from shardgrad.bench.crew import Seat, Trouble, Turn
from shardgrad.bench.measure import cost_on, peak_rss_nbytes, settle
from shardgrad.bench.models import facts_of
from shardgrad.bench.observation import Observation, Traffic
from shardgrad.bench.profiling import counting_dtensors, trace
from shardgrad.bench.task import Task
from shardgrad.bench.trace_reading import covered_us, lanes, launches, shortened, traffic, uncovered_us

__all__ = ["serve"]

_MOST_SPANS = 2000
_SENDING = ("all-gather", "reduce-scatter", "all-reduce")
_BUSY = ("compute", "optimizer")
_MATMUL_WIDTH = 1024
_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def serve(seat: Seat, pipe: Connection) -> None:
    """Answers commands until the pipe closes.

    A command is the name of a method of :class:`_Rank` and its arguments; the answer is what it returned, or
    a `Trouble`.
    """
    rank: _Rank | None = None
    try:
        rank = _Rank(seat)
        pipe.send(None)
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(rank, name)(*arguments))
    except EOFError:
        os._exit(0)  # nobody listens any more; graphs, watchdogs and peers may be in any state
    except BaseException as error:
        pipe.send(_trouble(error))
        os._exit(1)  # not by unwinding: a peer may never come to the collective that a destructor waits for


def _trouble(error: BaseException) -> Trouble:
    is_memory = (
        isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error).lower()
    )
    words = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
    return Trouble(words, "".join(traceback.format_exception(error)), is_memory)


class _Rank:
    """A contestant's part on this rank.

    Args:
        seat: who this is.
    """

    def __init__(self, seat: Seat) -> None:
        self._seat, self._task = seat, seat.task
        self._device = _join(seat)
        self._control = dist.new_group(backend="gloo")
        self._baseline_rss_nbytes = peak_rss_nbytes()
        self._losses: list[Tensor] = []
        self._traffic: dict[str, Traffic] = {}
        vocab_size = facts_of(self._task).vocab_size
        ranks = range(self._task.ranks) if CATALOGUE[seat.name].is_alone else [seat.rank]
        by_rank = [micro_batches(self._task, rank, vocab_size, self._device) for rank in ranks]
        steps = [[*chain.from_iterable(parts)] for parts in zip(*by_rank, strict=True)]
        self._data: Iterator[list[MicroBatch]] = cycle(steps)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._contestant = build(
            seat.name, _alone(self._task) if len(ranks) > 1 else self._task, self._device
        )

    def warm_up(self, steps: int) -> list[float]:
        """Takes steps and returns their losses."""
        for number in range(steps):
            # On a device, where a later step may be a graph, the second eager step shows what is sent.
            if number == 1 and self._device.type != "cpu":
                self._traffic = self._traffic_of(trace(self._step, self._device))
            else:
                self._step()
        settle()
        return self.losses()

    def losses(self) -> list[float]:
        """All losses so far: means over this rank's micro-batches."""
        return [float(loss) for loss in self._losses]

    def turn(self, steps: int) -> Turn:
        """Times steps, on all ranks at once, and the host's part of one more."""
        cost = cost_on(self._device.type, self._step, repeats=steps, barrier=self._barrier)
        if self._device.type == "cpu":
            return Turn(cost)
        began_s = time.perf_counter()
        self._step()
        host_s = time.perf_counter() - began_s
        torch.accelerator.synchronize()
        return Turn(cost, host_s)

    def observe(self) -> Observation:
        """Looks at memory first, then at single steps that are not timed."""
        peak_rss = peak_rss_nbytes()
        allocated = reserved = None
        if self._device.type == "cuda":
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        with counting_dtensors() as dtensors:
            self._step()
        self._barrier()
        events = trace(self._step, self._device)
        spans = lanes(events)
        timeline, dropped = shortened(spans if self._seat.rank == 0 else [], _MOST_SPANS)
        return Observation(
            baseline_rss_nbytes=self._baseline_rss_nbytes,
            peak_rss_nbytes=peak_rss,
            peak_allocated_nbytes=allocated,
            peak_reserved_nbytes=reserved,
            pool_nbytes=self._contestant.pool_nbytes(),
            dtensors=dtensors[0],
            launches=None if self._device.type == "cpu" else launches(events),
            traffic=self._traffic or self._traffic_of(events),
            timeline=timeline,
            dropped=dropped,
            communication_s=covered_us(spans, lanes=_SENDING) / 1e6,
            exposed_s=uncovered_us(spans, lanes=_SENDING, beside=_BUSY) / 1e6,
        )

    def hardware(self) -> dict[str, Any]:
        """What this rank computes on, with which libraries, and the rate of its matrix products.

        The rate is FLOP/s of a 1024 x 1024 product in the task's precision, on all ranks at once: what a
        share of the peak can be taken of where nobody publishes one.
        """
        import shardgrad.ops

        dtype = _COMPUTE_DTYPES[self._task.precision]
        matrix = torch.randn(_MATMUL_WIDTH, _MATMUL_WIDTH, device=self._device).to(dtype)
        repeats = 3 if self._device.type == "cpu" else 100
        costs = [
            cost_on(self._device.type, lambda: matrix @ matrix, repeats=repeats, barrier=self._barrier)
            for _ in range(4)
        ]
        facts: dict[str, Any] = {
            "ops_backend": shardgrad.ops.backend(),
            "matmul_flops_per_s": 2 * _MATMUL_WIDTH**3 / min(cost.wall_s for cost in costs[1:]),
            "threads_per_rank": torch.get_num_threads(),
            "model": dataclasses.asdict(facts_of(self._task)),
        }
        if self._device.type == "cuda":
            facts["device_name"] = torch.cuda.get_device_name(self._device)
            facts["device_nbytes"] = torch.cuda.get_device_properties(self._device).total_memory
            facts["cuda"] = torch.version.cuda
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        return facts

    def _step(self) -> None:
        self._losses.append(self._contestant.step(next(self._data)).detach().clone())

    def _barrier(self) -> None:
        dist.barrier(self._control)

    def _traffic_of(self, events: list[dict[str, Any]]) -> dict[str, Traffic]:
        shape = self._task.mesh_shape
        shards, replicas = shape[-1], shape[0] if len(shape) > 1 else 1
        return traffic(events, rank=self._seat.rank % shards, shards=shards, replicas=replicas)


def _alone(task: Task) -> Task:
    """What one process does that takes every rank's batch."""
    return dataclasses.replace(task, accumulate=task.accumulate * task.ranks, ranks=1, mesh=None)


def _join(seat: Seat) -> torch.device:
    """Makes this process a rank; returns its device."""
    import warnings

    from shardgrad.train.heap import keep_freed_memory

    # torch 2.13 gave collectives new names; engines that serve older ones know only the old.
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    task = seat.task
    if task.keep_heap and task.device == "cpu":
        keep_freed_memory()
    device = torch.device("cpu")
    backend = "gloo"
    torch.set_num_threads(1)
    if task.device == "cuda":
        index = 0 if task.share_device else seat.rank
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{Path(seat.meeting)}/store",
        rank=seat.rank,
        world_size=seat.ranks,
        timeout=timedelta(seconds=seat.answer_s),
    )
    return device
