"""What a changed record says a change would save is what a run that makes the change takes."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardgrad.explain import changes
from shardgrad.explain.replay import replay
from shardgrad.explain.step import Op
from shardgrad.explain.traces import read_trace, write_trace
from shardgrad.plan import rehearsal as rehearsing
from shardgrad.plan.cost import CostModel
from shardgrad.plan.exported import step_of
from shardgrad.plan.hardware import Machine, machine_of
from shardgrad.plan.recording import Kernel, Marked, Waited
from shardgrad.plan.rehearsal import Rehearsal, rehearse
from shardgrad.plan.request import Request
from shardgrad.plan.timeline import play

pytestmark = pytest.mark.timeout(400)

SMALL = Request(preset="small", override={"layers": 3}, ranks=16, seq_len=512, batch_size=8)
# Communication hidden, exposed, over replicas, with recomputation, accumulated; launched eagerly or
# not.
CASES = {
    "hidden": (SMALL, machine_of("h100")),
    "exposed": (SMALL.but(batch_size=1), machine_of("h100", network="eth25", is_graphed=True)),
    "replicas": (SMALL.but(mesh="2x8"), machine_of("h100", network="eth25", is_graphed=True)),
    "recomputed": (
        SMALL.but(activation_checkpointing="full"),
        machine_of("a100", network="eth100", is_graphed=True),
    ),
    "accumulated": (SMALL.but(accumulate=2, batch_size=4), machine_of("a100", network="eth25")),
}


@cache
def rehearsed(name: str, **fields: Any) -> Rehearsal:
    return rehearse(CASES[name][0].but(**fields))


def step_s(
    name: str, *, machine: Machine | None = None, scale: float = 1.0, **fields: Any
) -> float:
    """The step of a run that makes the change: rehearsed with it, and timed by the planner's own
    clock.
    """
    request, usual = CASES[name]
    cost = CostModel(machine or usual, request.shards, scale)
    return play(rehearsed(name, **fields).events, cost).step_s


def ops_of(name: str) -> tuple[Op, ...]:
    request, machine = CASES[name]
    return step_of(rehearsed(name), CostModel(machine, request.shards)).ops


@pytest.mark.parametrize("name", CASES)
def test_a_replayed_record_takes_what_the_run_took(name: str) -> None:
    assert replay(ops_of(name)).seconds == pytest.approx(step_s(name), rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_record_says_what_a_graph_would_save(name: str) -> None:
    graphed = dataclasses.replace(CASES[name][1], launch_s=0.0)
    guess = replay(changes.graphed(ops_of(name))).seconds
    assert guess == pytest.approx(step_s(name, machine=graphed), rel=0.05)


@pytest.mark.parametrize("name", CASES)
def test_a_record_says_what_reductions_in_bf16_would_save(name: str) -> None:
    guess = replay(changes.half_precision_reductions(ops_of(name))).seconds
    assert guess == pytest.approx(step_s(name, reduce_dtype="bf16"), rel=0.05)


@pytest.mark.parametrize("name", CASES)
def test_a_record_says_what_faster_links_would_save(name: str) -> None:
    machine = CASES[name][1]
    twice = {
        place: dataclasses.replace(
            link,
            bandwidth=2 * link.bandwidth,
            hop_s=tuple(hop / 2 for hop in link.hop_s),
            tree_hop_s=tuple(hop / 2 for hop in link.tree_hop_s),
        )
        for place, link in (("link", machine.link), ("network", machine.network))
    }
    start_s = tuple(seconds / 2 for seconds in machine.start_s)
    faster = dataclasses.replace(machine, start_s=start_s, **twice)
    guess = replay(changes.faster_links(ops_of(name))).seconds
    assert guess == pytest.approx(step_s(name, machine=faster), rel=0.05)


@pytest.mark.parametrize("name", CASES)
def test_a_record_says_what_faster_kernels_would_save(name: str) -> None:
    guess = replay(changes.faster_compute(ops_of(name))).seconds
    assert guess == pytest.approx(step_s(name, scale=0.9), rel=0.05)


@pytest.mark.parametrize("name", CASES)
def test_a_record_says_what_one_more_prefetch_would_save(name: str) -> None:
    """Forward and backward: the engine's own methods, called before its first step."""
    shard = rehearsing.shard_plan_model

    def with_prefetch(plan_model: Any, request: Request, mesh: Any) -> None:
        shard(plan_model, request, mesh)
        blocks = [block for _, block in plan_model.named_blocks()]
        units = [plan_model.module, *blocks]
        for number, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[number + 1 : number + 3])
            unit.set_modules_to_backward_prefetch(units[max(0, number - 2) : number][::-1])

    with mock.patch.object(rehearsing, "shard_plan_model", with_prefetch):
        changed = rehearse(CASES[name][0])
    request, machine = CASES[name]
    real = play(changed.events, CostModel(machine, request.shards)).step_s
    guess = replay(changes.one_more_prefetch(ops_of(name))).seconds
    assert guess == pytest.approx(real, rel=0.05)


def test_neither_a_mark_of_an_earlier_step_nor_a_wait_of_the_host_holds_back_a_stream() -> None:
    request, machine = CASES["hidden"]
    kernel = Kernel("compute", "add", "forward", False, 0.0, 0.0, "bf16", 10**6)
    events = Waited(7, "compute"), kernel, Marked(2, "compute"), Waited(2, None), kernel
    rehearsal = dataclasses.replace(rehearsed("hidden"), events=events)
    assert [op.after for op in step_of(rehearsal, CostModel(machine, request.shards)).ops] == [
        (),
        (),
    ]


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    request, machine = CASES["exposed"]
    step = step_of(rehearsed("exposed"), CostModel(machine, request.shards))
    played = replay(step.ops)
    write_trace(step, played, tmp_path / "trace.json")
    again = replay(read_trace(tmp_path / "trace.json").ops)
    assert again.seconds == pytest.approx(played.seconds, rel=1e-3)
    for kind, seconds in played.on_critical_path().items():
        assert again.on_critical_path().get(kind, 0.0) == pytest.approx(
            seconds, abs=0.01 * played.seconds
        )


def test_the_critical_path_and_the_bubbles_are_the_whole_step() -> None:
    for name in CASES:
        played = replay(ops_of(name))
        assert sum(played.on_critical_path().values()) == pytest.approx(played.seconds)
        lane = played.compute_lane()
        busy = sum(op.seconds for op in played.ops if op.lane == lane)
        assert busy + sum(played.bubbles().values()) == pytest.approx(played.seconds)
