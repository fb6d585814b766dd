"""Ranks that live for many programs: processes over gloo, threads with simulated devices, or
processes that share a GPU.

A program that leaves ranks in different places, or hangs, costs its world, which is started again.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.workers import SHARED_DEVICE
from tests.fuzz.programs import defects
from tests.fuzz.programs import net as nets
from tests.fuzz.programs.compare import Difference, Outcome, run
from tests.fuzz.programs.net import Net, Plan
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.sharded import noting_warnings, zero_copy_as_in
from tests.fuzz.programs.streams import Streams
from tests.support.ranks import RankError, Ranks

COLLECTIVE_TIMEOUT_S = 10.0  # a rank that waits so long for another has found a hang
AT_ONCE = 20  # programs between two words with a world


class Worlds:
    """All worlds; each starts when first used.

    Args:
        defect: one of `defects.DEFECTS`, which the engine then has; "" for none.
    """

    def __init__(self, defect: str = "") -> None:
        self._defect = defect
        self._started: dict[str, Any] = {}

    def close(self) -> None:
        """Ends all ranks."""
        for world in self._started.values():
            world.stop()
        self._started.clear()

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_all(self, programs: Sequence[Program]) -> Iterator[tuple[Program, Outcome]]:
        """Runs programs, by world; yields each with what came of it on all ranks together."""
        for world in dict.fromkeys(program.world for program in programs):
            mine = [program for program in programs if program.world == world]
            for i in range(0, len(mine), AT_ONCE):
                yield from self._run(world, mine[i : i + AT_ONCE])

    def run(self, program: Program) -> Outcome:
        """Runs one."""
        return next(iter(self._run(program.world, [program])))[1]

    def _run(self, world: str, programs: Sequence[Program]) -> Iterator[tuple[Program, Outcome]]:
        rest = list(programs)
        while rest:
            try:
                outcomes = self._ask(world, rest)
            except RankError as error:
                self._started.pop(_key(world), None)
                if len(rest) > 1:  # one of them did it: each by itself
                    for program in rest:
                        yield from self._run(world, [program])
                    return
                found = Difference(-1, "hang", f"hang: {str(error)[-3000:]}")
                outcomes = [Outcome([found], is_broken=True)]
            for program, outcome in zip(rest, outcomes, strict=False):
                yield program, outcome
                if outcome.is_broken:
                    with suppress(KeyError):
                        self._started.pop(_key(world)).stop()
            rest = rest[len(outcomes) :]

    def _ask(self, world: str, programs: Sequence[Program]) -> list[Outcome]:
        texts = [program.to_json() for program in programs]
        limit_s = 3 * COLLECTIVE_TIMEOUT_S + 2.0 * len(programs)
        if world.startswith("sim"):
            from tests.simulated.accelerator import build
            from tests.simulated.accelerator.process import SimulatorProcess

            build.build()  # here, because compiling may take longer than a program may
            simulator = self._started.setdefault(_key(world), SimulatorProcess())
            outcomes: list[Outcome] = simulator.run(
                run_simulated, texts, timeout_s=limit_s, defect=self._defect
            )
            return outcomes
        device = world.strip("0123456789") or "cpu"
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        ranks = self._started.setdefault(
            world, Ranks(programs[0].ranks, COLLECTIVE_TIMEOUT_S, backend=backend)
        )
        by_rank = ranks.run(
            run_on_rank, texts, timeout_s=limit_s, defect=self._defect, device=device
        )
        return _together(by_rank)


def _key(world: str) -> str:
    """Returns what a world is kept under; one process has simulated devices for any number of
    ranks.
    """
    return "sim" if world.startswith("sim") else world


def _together(by_rank: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Returns one outcome for each program, with the first difference that any rank saw."""
    merged = []
    for outcomes in zip(*by_rank, strict=False):
        found = [
            replace(each, text=f"on rank {rank}: {each.text}")
            for rank, outcome in enumerate(outcomes)
            for each in outcome.differences
        ]
        first = sorted(found, key=lambda each: each.place)[:1]
        merged.append(Outcome(first, any(outcome.is_broken for outcome in outcomes)))
    return merged


# -- processes


@cache
def _agreement() -> dist.ProcessGroup:
    """Returns a group on which ranks tell each other how a program ended."""
    return dist.new_group(timeout=timedelta(seconds=4 * COLLECTIVE_TIMEOUT_S))


def _sum_over_gloo(value: Tensor) -> Tensor:
    dist.all_reduce(value)
    return value


def _build(program: Program, plan: Plan) -> Net:
    return nets.build(program.model, plan, program.seed)


def run_on_rank(texts: Sequence[str], *, defect: str, device: str) -> list[Outcome]:
    """Runs programs on this rank, up to the first that leaves ranks in different places."""
    agreement = _agreement()
    streams = None
    if device == "cuda":
        os.environ |= SHARED_DEVICE | {"NCCL_HOSTID": f"rank{dist.get_rank()}"}
        streams = Streams(torch.device("cuda", 0))
    outcomes = []
    with ExitStack() as stack:
        stack.enter_context(noting_warnings())
        stack.enter_context(defects.put_back(defect))
        gc.disable()
        stack.callback(gc.enable)
        for program in map(Program.from_json, texts):
            with zero_copy_as_in(program):
                outcome = run(
                    program,
                    dist.get_rank(),
                    _sum_over_gloo,
                    lambda plan, program=program: _build(program, plan),
                    device=device,
                    streams=streams,
                )
            outcomes.append(outcome)
            broken = torch.tensor([float(outcome.is_broken)])
            dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=agreement)
            if broken.item():
                outcome.is_broken = True
                break
    gc.collect()
    return outcomes


# -- threads with simulated devices


class _Sum:
    """Sums over virtual ranks through the process's memory, which orders no streams."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=COLLECTIVE_TIMEOUT_S)
        self._values: list[Tensor] = [torch.empty(0)] * ranks

    def __call__(self, value: Tensor) -> Tensor:
        from tests.simulated.accelerator import device

        self._values[device.rank_thread.rank] = value
        self._barrier.wait()
        total = torch.stack(self._values).sum(0)
        self._barrier.wait()
        return total


def run_simulated(texts: Sequence[str], *, defect: str) -> list[Outcome]:
    """Runs programs on virtual ranks of this process."""
    from tests.simulated.accelerator import device
    from tests.simulated.accelerator.virtual_ranks import VirtualRanks

    merged = []
    with noting_warnings(), defects.put_back(defect):
        for program in map(Program.from_json, texts):
            with device.checked(raises=False) as hazards, zero_copy_as_in(program):
                try:
                    by_rank = VirtualRanks(program.ranks, COLLECTIVE_TIMEOUT_S).run(
                        _on_virtual_rank,
                        program,
                        _Sum(program.ranks),
                        timeout_s=4 * COLLECTIVE_TIMEOUT_S,
                    )
                except RankError as error:
                    found = Difference(-1, "hang", f"hang: {str(error)[-3000:]}")
                    by_rank = [Outcome([found], is_broken=True)]
                for index in range(program.ranks):
                    torch.accelerator.synchronize(index)
            (outcome,) = _together([[outcome] for outcome in by_rank])
            if hazards and not outcome.is_broken:
                outcome.differences.append(Difference(-1, "hazard", str(hazards[0])))
            merged.append(outcome)
            if outcome.is_broken:
                break
    return merged


def _on_virtual_rank(program: Program, exchange: _Sum) -> Outcome:
    from tests.simulated.accelerator import device
    from tests.simulated.accelerator.virtual_ranks import one_at_a_time

    def build(plan: Plan) -> Net:
        with one_at_a_time():
            return _build(program, plan)

    streams = Streams(torch.device(device.NAME, torch.accelerator.current_device_index()))
    rank = device.rank_thread.rank
    return run(program, rank, exchange, build, device=device.NAME, streams=streams)
