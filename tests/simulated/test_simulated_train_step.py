"""The training program's step on a device with graphs: captured by itself, with an eager step's
numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardgrad.programs.train.checkpoint import TrainState
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.parallel import World
from shardgrad.programs.train.presets import PRESETS, TransformerConfig
from shardgrad.programs.train.sharding import build_model
from shardgrad.programs.train.step import TrainStep, build_optimizer
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import on_virtual_ranks, one_at_a_time

STEPS = 7
SMALL = TransformerConfig(width=16, layers=2, heads=2, kv_heads=1, hidden=16)
UNTIED = replace(SMALL, tied=False)


def trained(config: TrainConfig) -> tuple[list[float], int]:
    """Trains with an evaluation in between; returns numbers, and how many steps were replays."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = World(rank, ranks, torch.device(NAME, rank))
    with one_at_a_time():
        model = build_model(config, init_device_mesh(NAME, (ranks,)), place.device)
    state = TrainState(model, build_optimizer(model, config))
    text = torch.randint(256, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(text, config.seq_len, seed=0)
    step = TrainStep(state, sampler, config, place)
    seen = []
    for number in range(STEPS):
        loss, grad_norm = step()
        seen += [loss.item(), grad_norm.item(), state.optimizer.param_groups[0]["lr"]]
        if number == STEPS // 2:
            with torch.no_grad():
                held_out = (each.to(place.device) for each in sampler.batch(99, 3))
                seen.append(model.loss(*held_out).item())
    return seen, getattr(step.update, "replays", 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 3},
        {
            "activation_checkpointing": True,
            "precision": "bf16-mixed",
            "preset": "untied",
        },
    ],
    ids=" ".join,
)
@mock.patch.dict(PRESETS, {"tiny": SMALL, "untied": UNTIED})
@on_virtual_ranks(2)
def test_the_program_captures_its_step_and_trains_as_without(settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {"steps": STEPS, "seq_len": 8, "batch_size": 2}
    common |= {"lr": 1e-2, **settings}
    runs = []
    for graph in (False, True):
        with checked():
            runs.append(trained(TrainConfig(**common, graph=graph)))
    (off, of_eager), (auto, replays) = runs
    assert off == auto
    assert (of_eager, replays) == (0, STEPS - 3)
