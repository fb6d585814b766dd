"""Adapters, heads and scales attached after `fully_shard`: refused by name, or right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from shardgrad import fully_shard
from shardgrad.errors import UnownedParameterError
from tests.support.parity import SHARDGRAD, Engine, Tensors, as_unsharded
from tests.support.ranks import on_ranks

WIDTH = 6


class Block(nn.Module):
    """A frozen base, and an adapter if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        y = y + self.lora(x) if hasattr(self, "lora") else y
        return y * self.scale if hasattr(self, "scale") else y


def blocks(engine: Engine, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    engine.shard(*model, model, **options)
    return model


def loss_of(engine: Engine, model: nn.Module, step: int = 0) -> Tensor:
    return engine.loss(model, step, WIDTH)


def an_adapter(model: nn.Sequential) -> None:
    model[1].lora = nn.Linear(WIDTH, WIDTH, bias=False)


@pytest.mark.parametrize("trained_before", [False, True], ids=["first", "after_a_step"])
@on_ranks(2)
@as_unsharded
def test_an_adapter_and_a_head_train_like_the_unsharded_model_once_the_line_is_added(
    engine: Engine, trained_before: bool
) -> Tensors:
    model = blocks(engine)
    if trained_before:
        loss_of(engine, model).backward()
        model.zero_grad()
    torch.manual_seed(1)
    an_adapter(model)
    model.append(nn.Linear(WIDTH, 2))
    if not engine.whole_batch:
        with pytest.raises(UnownedParameterError):
            loss_of(engine, model)
    engine.shard(model[1].lora, model[2])
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optim.zero_grad()
        loss_of(engine, model, step).backward()
        optim.step()
    return engine.snapshot(model)


@on_ranks(2)
def test_ignored_parameters_and_replicas_of_ddp_are_left_to_the_program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    an_adapter(model)
    fully_shard(model, ignored_params=set(model[1].lora.parameters()))
    model[0].lora = replicate(nn.Linear(WIDTH, WIDTH))
    model.append(DistributedDataParallel(nn.Linear(WIDTH, WIDTH)))
    model[1].lora.load_state_dict({"weight": torch.ones(WIDTH, WIDTH)}, assign=True)
    loss_of(SHARDGRAD, model).backward()
    assert model[1].lora.weight.grad is not None


@on_ranks(2)
def test_only_what_is_under_the_called_part_is_looked_at() -> None:
    model = blocks(SHARDGRAD)
    an_adapter(model)
    model[0](torch.ones(2, WIDTH)).sum().backward()  # the other part has the adapter
    model[0].scale = nn.Parameter(torch.ones(WIDTH))
    for part, name in zip(model, ("scale", r"lora\.weight"), strict=True):
        with pytest.raises(UnownedParameterError, match=name):
            part(torch.ones(2, WIDTH))


# -- around the units


class Agent(nn.Module):
    """A sharded model, and a head that `fully_shard` was not called on."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


@pytest.mark.parametrize("is_around", [False, True], ids=["an adapter", "a head around"])
@on_ranks(2)
def test_what_was_frozen_is_refused_when_it_begins_to_train(is_around: bool) -> None:
    model = blocks(SHARDGRAD)
    if is_around:
        late, name = nn.Linear(WIDTH, 1), r"head\.weight"
        model = Agent(model, late)
    else:
        an_adapter(model)
        late, name = model[1].lora, r"1\.lora\.weight"
    late.requires_grad_(False)
    for _ in range(2):
        loss_of(SHARDGRAD, model).backward()
    late.requires_grad_(True)
    with pytest.raises(UnownedParameterError, match=name):
        loss_of(SHARDGRAD, model)


@on_ranks(2)
def test_replicas_of_ddp_around_the_units_are_left_to_the_program() -> None:
    # Named until backward has ended: DDP reads its reducer then, also if it was collected with its
    # model meanwhile, and waits for a mutex that is no more.
    agent = Agent(blocks(SHARDGRAD), DistributedDataParallel(nn.Linear(WIDTH, 1)))
    loss_of(SHARDGRAD, agent).backward()
    replica = replicate(nn.Sequential(Agent(blocks(SHARDGRAD), nn.Linear(WIDTH, 1))))
    loss_of(SHARDGRAD, replica).backward()
