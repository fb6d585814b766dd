"""torch's pipeline schedules over sharded stages: the same numbers as with FSDP2 in their place."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import shardgrad
from tests.support.parity import FSDP2, SHARDGRAD, Engine, Tensors, assert_same_bits, stack
from tests.support.ranks import Ranks

MICRO_BATCHES = 4
STEPS = 2


@cache
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def block(seed: int) -> nn.Sequential:
    return stack(6, 10, 6, seed=seed)


def train(engine: Engine, schedule: str) -> Tensors:
    """Trains two pipeline ranks of two data-parallel ranks each; returns what this rank holds."""
    mesh = grid()
    rank = mesh.get_local_rank("pp")
    looped = schedule == "interleaved"
    indices = [rank, rank + 2] if looped else [rank]
    modules = [block(seed=index) for index in indices]
    for module in modules:
        for layer in module:
            if isinstance(layer, nn.Linear):
                engine.fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        engine.fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
    group = mesh.get_group("pp")
    stages = [
        PipelineStage(module, index, 2 * len(indices), torch.device("cpu"), group=group)
        for module, index in zip(modules, indices, strict=True)
    ]
    runner: Any = (
        ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=F.mse_loss)
        if looped
        else Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=F.mse_loss)
    )
    optims = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules]
    found: Tensors = {}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
        x, target = torch.randn(2, 4 * MICRO_BATCHES, 6, generator=generator).unbind()
        losses: list[torch.Tensor] = []
        is_last = stages[-1].is_last
        runner.step(*((x,) if rank == 0 else ()), **({"target": target, "losses": losses} if is_last else {}))
        for i, loss in enumerate(losses):
            found[f"loss {step}.{i}"] = loss.detach()
        for number, (module, optim) in enumerate(zip(modules, optims, strict=True)):
            if step == STEPS - 1:
                found |= {f"{number}.{name}": value for name, value in engine.snapshot(module).items()}
            optim.step()
            optim.zero_grad()
    return found


def schedules_agree(schedule: str) -> None:
    ours, theirs = train(SHARDGRAD, schedule), train(FSDP2, schedule)
    assert any(name.endswith(".grad") for name in ours)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_schedule_trains_like_under_fsdp2(four_ranks: Ranks, schedule: str) -> None:
    four_ranks.run(schedules_agree, schedule)


def look_at_views() -> None:
    model = stack(5, 7, 3)
    shardgrad.fully_shard(model[0])
    shardgrad.fully_shard(model)
    state = fsdp.fully_shard.state(model)
    assert [view._modules for view in state._state_ctx.all_states] == [(model,), (model[0],)]
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    assert [view.sharded_param for view in group.fsdp_params] == [model[2].weight, model[2].bias]
    assert [view._param_fqn for view in group.fsdp_params] == ["2.weight", "2.bias"]
    with pytest.raises(AssertionError):
        fsdp.fully_shard(model)  # torch sees that somebody has been here


def test_torch_finds_its_names_on_our_modules(two_ranks: Ranks) -> None:
    two_ranks.run(look_at_views)
