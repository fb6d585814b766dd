"""Clip, scale and step, captured: a replay follows schedules and skips by itself, bit for bit like
eager.

Backward runs outside the graph and writes the same addresses, so what is captured is what this
project's optimizers promise: norm, factor, skip and update, with every number in device memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.errors import CaptureError
from tests.simulated.accelerator.device import NAME, Graph, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, one_at_a_time

Optimizer = Callable[[Any], torch.optim.Optimizer]

# Their state is in bfloat16 parameters' own buffers too, where they have one.
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda p: shardgrad.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adam with a master": lambda p: shardgrad.optim.Adam(p, lr=1e-2, master="float32"),
    "adam with a remainder": lambda p: shardgrad.optim.Adam(p, lr=1e-2, master="remainder"),
    "adamw rounding stochastically": lambda p: shardgrad.optim.AdamW(
        p, lr=1e-2, stochastic_rounding=True
    ),
    "sgd": lambda p: shardgrad.optim.SGD(p, lr=1e-1),
    "sgd with momentum": lambda p: shardgrad.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
    "muon": lambda p: shardgrad.optim.Muon(p, lr=1e-2),
}
STEPS, WARM_UP, BAD_STEP = 7, 2, 4


def build(dtype: torch.dtype) -> nn.Module:
    mesh = init_device_mesh(NAME, (dist.get_world_size(),))
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False, dtype=dtype) for _ in range(3)))
    model = model.to(NAME)
    for layer in model:
        shardgrad.fully_shard(layer, mesh=mesh)
    return shardgrad.fully_shard(model, mesh=mesh)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 6, generator=generator).to(dtype).to(NAME)


def train(
    make: Optimizer, dtype: torch.dtype, *, captured: bool
) -> tuple[list[torch.Tensor], float, list[float]]:
    """Returns the weights, how many steps were skipped, and the norms."""
    model = build(dtype)
    optim, scaler = (
        make(model.parameters()),
        shardgrad.GradScaler(init_scale=4.0, growth_interval=2),
    )
    norm, graph, norms = torch.zeros((), device=NAME), Graph(), []

    def update() -> None:
        scaler.unscale_(optim)
        norm.copy_(shardgrad.clip_grad_norm_(model, 0.1))
        scaler.step(optim)
        scaler.update()

    side = torch.Stream(NAME)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for step in range(STEPS):
            optim.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optim.param_groups[0]["weight_decay"] = 0.01 * step
            scaler.scale(model(batch(step, dtype)).square().mean()).backward()
            if step == BAD_STEP and dist.get_rank() == 0:
                model[0].weight.grad.to_local().fill_(math.inf)
            if not captured or step < WARM_UP:
                update()
            else:
                if step == WARM_UP:
                    with graph.capture(side):
                        update()
                graph.replay()
            norms.append(norm.item())
            optim.zero_grad()
    weights = [p.to_local().detach().cpu() for p in model.parameters()]
    return weights, optim.skipped_steps.item(), [*norms, scaler.get_scale()]


def a_replay_equals_eager(name: str) -> None:
    dtype = torch.bfloat16 if name.startswith("adam") and " " in name else torch.float32
    with checked():
        eager = train(OPTIMIZERS[name], dtype, captured=False)
        replayed = train(OPTIMIZERS[name], dtype, captured=True)
    for right, ours in zip(eager[0], replayed[0], strict=True):
        assert torch.equal(right, ours)
    assert eager[1] == replayed[1] == 1.0
    assert eager[2] == replayed[2]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replay_follows_schedules_skips_and_equals_eager(name: str) -> None:
    VirtualRanks(2).run(a_replay_equals_eager, name)


def skips_are_counted_by_replays_alone() -> None:
    """The first verdict that the optimizer ever gets is inside the graph."""
    model = build(torch.float32)
    optim = shardgrad.optim.AdamW(model.parameters())
    graph, side = Graph(), torch.Stream(NAME)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        model(batch(0, torch.float32)).square().mean().backward()
        optim.step()
        shardgrad.clip_grad_norm_(model, 1.0)
        with graph.capture(side):
            shardgrad.clip_grad_norm_(model, 1.0)
            optim.step()
        model[0].weight.grad.to_local().fill_(math.nan)
        for skipped in (1, 2, 3):
            graph.replay()
            assert optim.skipped_steps.item() == skipped
        assert optim.state[model[0].weight]["step"] == 1


def test_replays_count_the_steps_they_skip() -> None:
    VirtualRanks(2).run(skips_are_counted_by_replays_alone)


def what_cannot_be_captured_is_refused() -> None:
    model = build(torch.float32)
    optim = shardgrad.optim.AdamW(model.parameters())
    stock = torch.optim.AdamW(model.parameters(), capturable=False)
    side = torch.Stream(NAME)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        model(batch(0, torch.float32)).square().mean().backward()
        optim.step()
        for wrong in (lambda: optim.param_groups[0].update(lr=0.5), stock.step):
            graph = Graph()
            with pytest.raises(CaptureError), graph.capture(side):
                wrong()
        assert optim.param_groups[0]["lr"] == 1e-3


def test_an_assignment_or_a_stock_step_inside_a_capture_is_refused() -> None:
    VirtualRanks(1).run(what_cannot_be_captured_is_refused)
