"""What a recorded step says a change would save is what the step takes in a program that makes the
change.

The program runs on the simulated accelerator, which records what waits for what; durations are
given. The changed step is recorded from the changed program, and timed by vector clocks, not by the
replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardgrad
from shardgrad.cli import main
from shardgrad.explain import changes
from shardgrad.explain.replay import replay
from shardgrad.explain.traces import write_trace
from tests.simulated.accelerator.device import NAME
from tests.simulated.accelerator.virtual_ranks import one_at_a_time
from tests.simulated.programs.timed import Clock, Recorded, record, seconds_of, step_of

WIDTH, DEPTH, STEPS = 32, 4, 6


@dataclass(frozen=True)
class Case:
    """A program, and how fast its device is.

    Attributes:
        clock: durations.
        gains: changes that save at least 3 % of its step.
        ranks: number of virtual ranks.
        replicas: of the shards.
        recomputes: blocks are recomputed in backward.
        micro_batches: in a step, each reduced.
        passes: of every second block, through the same weights.
    """

    clock: Clock
    gains: tuple[str, ...]
    ranks: int = 2
    replicas: int = 1
    recomputes: bool = False
    micro_batches: int = 1
    passes: int = 1


GRAPH, BF16, PREFETCH = "a graph", "reductions in bf16", "one more prefetch"
LINKS, KERNELS = "links twice as fast", "kernels 10 % faster"
SLOW = Clock(product_s=20e-6, bytes_per_s=1e8)
CASES = {
    "hidden": Case(Clock(product_s=60e-6), (KERNELS,)),
    "exposed": Case(Clock(product_s=15e-6, bytes_per_s=5e7), (BF16, LINKS)),
    "launches are slow": Case(Clock(product_s=8e-6, launch_s=20e-6), (GRAPH,)),
    "replicas": Case(
        Clock(product_s=30e-6, bytes_per_s=2e8),
        (BF16, PREFETCH, LINKS, KERNELS),
        ranks=4,
        replicas=2,
    ),
    "recomputed": Case(SLOW, (BF16, LINKS), recomputes=True),
    "accumulated": Case(SLOW, (BF16, LINKS), micro_batches=2),
    "uneven": Case(
        Clock(product_s=20e-6, bytes_per_s=1.5e8, launch_s=2e-6),
        (BF16, PREFETCH, LINKS, KERNELS),
        passes=4,
    ),
}


@dataclass(frozen=True)
class Changed:
    """What a program does differently."""

    graphed: bool = False
    reduces_in_bf16: bool = False
    prefetches: bool = False


class Block(nn.Module):
    def __init__(self, *, recomputes: bool, passes: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recomputes, self.passes = recomputes, passes

    def body(self, x: Tensor) -> Tensor:
        for _ in range(self.passes):
            x = x + self.down(torch.tanh(self.up(x)))
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)
        return self.body(x)


def prepare(case: Case, changed: Changed) -> Callable[[], None]:
    """Builds the model on a rank; returns what runs a step of it."""
    shape = (case.ranks,) if case.replicas == 1 else (case.replicas, case.ranks // case.replicas)
    mesh = init_device_mesh(NAME, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    reduced = torch.bfloat16 if changed.reduces_in_bf16 else torch.float32
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": shardgrad.MixedPrecisionPolicy(torch.bfloat16, reduced),
        "reshard_after_forward": True,
    }
    with one_at_a_time():
        torch.manual_seed(0)
        blocks = [
            Block(recomputes=case.recomputes, passes=1 if number % 2 else case.passes)
            for number in range(DEPTH)
        ]
        model = nn.Sequential(*blocks)
    model = model.to(NAME)
    for block in model:
        shardgrad.fully_shard(block, **options)
    shardgrad.fully_shard(model, **options)
    if changed.prefetches:
        for number, block in enumerate(model):
            block.set_modules_to_forward_prefetch([*model][number + 1 : number + 3])
            block.set_modules_to_backward_prefetch([*model][max(0, number - 2) : number][::-1])
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).to(NAME)

    def step(x: Tensor) -> None:
        for _ in range(case.micro_batches):
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return partial(shardgrad.graphed_step(model, optimizer)(step) if changed.graphed else step, x)


def recorded(case: Case, changed: Changed = Changed()) -> Recorded:
    return record(case.ranks, prepare, case, changed, steps=STEPS)


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_step_says_what_changes_would_save(name: str) -> None:
    case = CASES[name]
    clock, before = case.clock, recorded(case)
    ops = step_of(before, clock).ops
    assert replay(ops).seconds == pytest.approx(seconds_of(before, clock), rel=1e-9)

    graph = recorded(case, Changed(graphed=True))
    assert graph.is_graph
    guesses = {
        GRAPH: (changes.graphed(ops), seconds_of(graph, clock)),
        BF16: (
            changes.half_precision_reductions(ops),
            seconds_of(recorded(case, Changed(reduces_in_bf16=True)), clock),
        ),
        PREFETCH: (
            changes.one_more_prefetch(ops),
            seconds_of(recorded(case, Changed(prefetches=True)), clock),
        ),
        LINKS: (
            changes.faster_links(ops),
            seconds_of(before, clock.with_faster(links=2.0)),
        ),
        KERNELS: (
            changes.faster_compute(ops),
            seconds_of(before, clock.with_faster(kernels=1 / 0.9)),
        ),
    }
    wrong = {
        change: (replay(changed).seconds, real)
        for change, (changed, real) in guesses.items()
        if replay(changed).seconds != pytest.approx(real, rel=0.05)
    }
    assert not wrong, (replay(ops).seconds, wrong)
    gains = {
        change for change, (_, real) in guesses.items() if real < 0.97 * seconds_of(before, clock)
    }
    assert gains == {*case.gains}


def test_the_command_explains_a_recorded_step(tmp_path: Path) -> None:
    case = CASES["exposed"]
    step = step_of(recorded(case), case.clock)
    write_trace(step, replay(step.ops), tmp_path / "trace.json")
    result = CliRunner().invoke(main, ["explain", str(tmp_path / "trace.json"), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["replayed_s"] == pytest.approx(replay(step.ops).seconds, rel=1e-3)
    right = {one.change.name: one.share for one in changes.savings(step.ops)}
    assert {row["change"]: row["share"] for row in told["changes"]} == pytest.approx(
        right, abs=1e-3
    )
    assert min(right, key=lambda change: right[change]) == "free communication"
