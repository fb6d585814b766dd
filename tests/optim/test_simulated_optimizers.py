"""Clip, scale and step, captured: a replay follows schedules and skips by itself, bit for bit like
eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardgrad
from tests.simulated.accelerator.device import NAME, Graph, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, on_virtual_ranks
from tests.simulated.programs.graphed import (
    batch,
    build,
    loss_of,
    same_bits_as_eager,
)
from tests.support.graphed import Graphed, Values, require_replays

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
    "adam with states on the host": lambda p: shardgrad.optim.Adam(
        p, lr=1e-2, master="float32", states_on_host=True
    ),
}
BAD_STEP = 5


@pytest.mark.parametrize("name", OPTIMIZERS)
@same_bits_as_eager(2)
def test_a_replay_follows_schedules_skips_and_equals_eager(graphed: Graphed, name: str) -> Values:
    dtype = torch.bfloat16 if name.startswith("adam") and " " in name else torch.float32
    model = build(dtype=dtype)
    optim = OPTIMIZERS[name]([p for p in model.parameters() if p.ndim == 2])
    scaler = shardgrad.GradScaler(init_scale=4.0, growth_interval=2)

    @graphed(model, optim, scaler)
    def step(x: Tensor) -> Tensor:
        scaler.scale(loss_of(model, x)).backward()
        scaler.unscale_(optim)
        norm = shardgrad.clip_grad_norm_(model, 0.1)
        scaler.step(optim)
        scaler.update()
        model.zero_grad()
        return norm

    for number in range(8):
        optim.param_groups[0].update(lr=1e-2 / (number + 1), weight_decay=0.01 * number)
        x = batch(number).to(dtype)
        if number == BAD_STEP and dist.get_rank() == 0:
            x[0, 0] = math.inf
        yield step(x).nan_to_num(nan=-1.0, posinf=-1.0)
    require_replays(step, 1, 5)
    assert optim.skipped_steps.item() == 1
    yield scaler.get_scale(), model


@on_virtual_ranks(2)
def test_replays_count_the_steps_they_skip() -> None:
    """The first verdict that the optimizer ever gets is inside the graph."""
    model = build()
    optim = shardgrad.optim.AdamW(model.parameters())
    graph, side = Graph(), torch.Stream(NAME)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        loss_of(model, batch(0)).backward()
        optim.step()
        shardgrad.clip_grad_norm_(model, 1.0)
        with graph.capture(side):
            shardgrad.clip_grad_norm_(model, 1.0)
            optim.step()
        model[0].first.weight.grad.to_local().fill_(math.nan)
        for skipped in (1, 2, 3):
            graph.replay()
            assert optim.skipped_steps.item() == skipped
        assert optim.state[model[0].first.weight]["step"] == 1


def clamped_through_data(waits_for_the_update_only: bool) -> None:
    """The recipe of Wasserstein GANs: torch counts no version of a write through `.data`."""
    model = build()
    optim = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    x = batch(0)  # once: the host waits for its copy
    for _ in range(3):
        loss_of(model, x).backward()
        optim.step()
        if waits_for_the_update_only:
            updated = torch.accelerator.current_stream().record_event()
            model.set_post_optim_event(updated)
        for param in model.parameters():
            param.data.clamp_(-0.1, 0.1)
        optim.zero_grad(set_to_none=False)  # None would free memory, which streams wait for


@pytest.mark.parametrize("waits_for_the_update_only", [False, True])
def test_the_next_gathers_wait_for_what_a_program_writes_after_the_step(
    waits_for_the_update_only: bool,
) -> None:
    """Why no gather starts at the update of its own group, unless the program says that it may."""
    with checked(raises=False) as hazards:
        VirtualRanks(2).run(clamped_through_data, waits_for_the_update_only)
    assert bool(hazards) is waits_for_the_update_only
