"""Ranks that live for many programs: processes over gloo, threads with simulated devices, or
processes that share a GPU.

A program that leaves ranks in different places, or hangs, costs its world, which is started again.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.workers import SHARED_DEVICE
from shardgrad.engine.tracing import NOTHING
from tests.fuzz.programs.compare import Difference, Outcome, run
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.sharded import noting_warnings, zero_copy_as_in
from tests.support.ranks import RankError, Ranks
from tests.support.stand_ins.symmetric_memory import symmetric_memory_on_the_cpu

COLLECTIVE_TIMEOUT_S = 10.0  # a rank that waits so long for another has found a hang
LIMIT_S = 4 * COLLECTIVE_TIMEOUT_S


class Worlds:
    """All worlds; each starts when first used."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        for world in self._made.values():
            world.stop()

    def run(self, program: Program) -> Outcome:
        """Runs a program; returns what came of it on all ranks together."""
        if program.device == "sim":
            from tests.simulated.accelerator import build
            from tests.simulated.accelerator.process import SimulatorProcess

            build.build()  # here, because compiling may take longer than a program may
            # One process has devices for any number of ranks.
            world, function = self._kept("sim", SimulatorProcess), run_simulated
        else:
            backend = "gloo" if program.device == "cpu" else "cpu:gloo,cuda:nccl"
            make = partial(Ranks, program.ranks, COLLECTIVE_TIMEOUT_S, backend=backend)
            world, function = self._kept(program.world, make), run_on_rank
        try:
            outcome = together(world.run(function, program.to_json(), timeout_s=LIMIT_S))
        except RankError as error:
            outcome = _hung(error)
        if outcome.is_broken:
            world.stop()  # which starts again with the next program
        return outcome

    def _kept(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def together(by_rank: Sequence[Outcome]) -> Outcome:
    """Returns one outcome, with the first difference that any rank saw."""
    found = [
        replace(each, text=f"on rank {rank}: {each.text}")
        for rank, outcome in enumerate(by_rank)
        for each in outcome.differences
    ]
    first = sorted(found, key=lambda each: each.place)[:1]
    return Outcome(first, any(outcome.is_broken for outcome in by_rank))


def _hung(error: RankError) -> Outcome:
    return Outcome([Difference(-1, "hang", f"hang: {str(error)[-3000:]}")], is_broken=True)


@contextmanager
def prepared(program: Program) -> Iterator[None]:
    """The engine as a program wants it."""
    memory = NOTHING if program.on_device else symmetric_memory_on_the_cpu()
    with noting_warnings(), zero_copy_as_in(program), memory:
        yield


# -- processes


@cache
def _group_of_plain_torch() -> dist.ProcessGroup:
    """Returns a group of its own: in the engine's, plain torch would fail with the engine."""
    return dist.new_group()


def _sum_over_gloo(value: Tensor) -> Tensor:
    dist.all_reduce(value, group=_group_of_plain_torch())
    return value


def run_on_rank(text: str) -> Outcome:
    """Runs a program on this rank."""
    program = Program.from_json(text)
    if program.device == "cuda":
        os.environ |= SHARED_DEVICE | {"NCCL_HOSTID": f"rank{dist.get_rank()}"}
    gc.disable()
    try:
        with prepared(program):
            return run(program, dist.get_rank(), _sum_over_gloo)
    finally:
        gc.enable()
        gc.collect()


# -- threads with simulated devices


class _Sum:
    """Sums over virtual ranks through the process's memory, which orders no streams."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=COLLECTIVE_TIMEOUT_S)
        self._values = [torch.empty(0)] * ranks

    def __call__(self, value: Tensor) -> Tensor:
        self._values[dist.get_rank()] = value
        self._barrier.wait()
        total = torch.stack(self._values).sum(0)
        self._barrier.wait()
        return total


def run_simulated(text: str) -> list[Outcome]:
    """Runs a program on virtual ranks of this process; after their outcomes come hazards between
    streams.
    """
    from tests.simulated.accelerator import device
    from tests.simulated.accelerator.virtual_ranks import VirtualRanks

    program = Program.from_json(text)
    ranks = VirtualRanks(program.ranks, COLLECTIVE_TIMEOUT_S)
    with device.checked(raises=False) as hazards, prepared(program):
        try:
            outcomes = ranks.run(_on_virtual_rank, program, _Sum(program.ranks), timeout_s=LIMIT_S)
        except RankError as error:
            outcomes = [_hung(error)]
        for index in range(program.ranks):
            torch.accelerator.synchronize(index)
    return [*outcomes, Outcome([Difference(-1, "hazard", str(each)) for each in hazards[:1]])]


def _on_virtual_rank(program: Program, exchange: _Sum) -> Outcome:
    return run(program, dist.get_rank(), exchange)
