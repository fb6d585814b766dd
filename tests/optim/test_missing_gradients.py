"""A gradient that is None counts as in torch, and it is None if no rank has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardgrad
from tests.support.muon import TIGHT, exactly, muon
from tests.support.parity import (
    GATHERED,
    SHARDGRAD,
    UNSHARDED,
    Engine,
    Tensors,
    assert_close,
    route,
    stack,
)
from tests.support.ranks import on_ranks

Make = Callable[..., torch.optim.Optimizer]


def adamw(engine: Engine, params: Any, **options: Any) -> torch.optim.Optimizer:
    return engine.optim.AdamW(params, **options)


EACH = pytest.mark.parametrize("make", [adamw, muon])


def train_with_gaps(engine: Engine, make: Make) -> Tensors:
    """A gradient is dropped in one step, assigned to a frozen parameter in another; no decay and no
    momentum may move.
    """
    model = engine.fully_shard(stack(5, 4, 3))
    optim = make(engine, [p for p in model.parameters() if p.ndim == 2], lr=0.1)
    for step in range(4):
        model[2].weight.requires_grad_(step != 2)
        engine.loss(model, step, 5).backward()
        if step == 1:
            model[0].weight.grad = None
        if step == 2:
            model[2].weight.grad = torch.ones_like(model[2].weight) * model[2].weight.detach()
        optim.step()
        if step == 0:
            optim.step()  # a second step on the same gradients
        optim.zero_grad()
        optim.step()  # without any gradient
    return engine.snapshot(model)


def train_with_units_that_rest(engine: Engine, make: Make) -> Tensors:
    """Whole units have no gradient in some steps, one is frozen: waves are put together anew."""
    model = route(4, 3).to(torch.float64)
    engine.shard(*model.layers, model)
    optim = make(engine, model.parameters(), lr=0.05)
    for step, used in enumerate([(0,), (0, 1), (1, 2), (0, 1, 2), (2,), (0, 1)]):
        if step == 3:
            model.layers[1].weight.requires_grad_(False)
        model(engine.inputs(step, 4), *used).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return engine.snapshot(model)


@pytest.mark.filterwarnings("ignore::shardgrad.UntrainedParameterWarning")
@pytest.mark.parametrize("train", [train_with_gaps, train_with_units_that_rest])
@EACH
@on_ranks(2)
def test_a_gradient_that_is_none_or_assigned_counts_as_it_does_in_torch(
    make: Make, train: Callable[[Engine, Make], Tensors]
) -> None:
    with exactly():
        assert_close(train(GATHERED, make), train(UNSHARDED, make), tolerance=TIGHT)


@pytest.mark.filterwarnings("ignore::shardgrad.UntrainedParameterWarning")
@EACH
@on_ranks(2)
def test_the_none_rule_is_that_of_all_ranks_together(make: Make) -> None:
    model = route(4, 3)
    before = [layer.weight.detach().clone() for layer in model.layers]
    shardgrad.fully_shard(model)
    optim = make(SHARDGRAD, model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(2):
        used = (0, 1) if dist.get_rank() == step else (0,)
        model(SHARDGRAD.inputs(step, 4), *used).sum().backward()
        optim.step()
        optim.zero_grad()
    changed = [
        not torch.equal(layer.weight.full_tensor(), old)
        for layer, old in zip(model.layers, before, strict=True)
    ]
    assert changed == [True, True, False]
    assert [optim.state[p]["step"].item() for p in model.parameters()] == [2, 2, 0]
