"""Hooks on optimizers are there while a sharded model is, and change nothing for other
optimizers.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import shardgrad
from shardgrad.errors import OptimizerParameterError
from tests.support.parity import SHARDGRAD, stack
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_an_optimizer_is_looked_at_again_after_its_parameters_were_sharded() -> None:
    """An optimizer that had nothing to do with any model, until its parameters were sharded."""
    kept = SHARDGRAD.fully_shard(stack(5, 3))  # so that hooks are there from the beginning
    model = stack(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    SHARDGRAD.fully_shard(model)
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(OptimizerParameterError, match="before fully_shard"):
        optimizer.step()
    for param in optimizer.param_groups[0]["params"]:
        param.requires_grad_(False)
    optimizer.step()  # it has nothing to train
    assert kept is not None


@on_ranks(2)
def test_an_optimizer_of_assigned_parameters_may_step_before_the_next_forward() -> None:
    """Its writes, which torch does not count, are seen although the parameters had no owner yet."""
    plain, model = stack(5, 3), SHARDGRAD.fully_shard(stack(5, 3), zero_stage=2)
    model(torch.ones(1, 5)).sum().backward()
    model.zero_grad()
    layer = model[0]
    for name, param in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(param.detach().clone()))
    losses = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, foreach=True)
        optimizer.step()
        for _ in range(3):
            loss = each(torch.ones(1, 5)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1])


@on_ranks(2)
def test_a_model_may_die_during_the_step_of_another_optimizer() -> None:
    """torch iterates over its hooks then, so removing them would break the step of another
    optimizer.
    """
    gc.collect()
    models = [SHARDGRAD.fully_shard(stack(5, 3))]
    plain = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def drop_the_model(*_: object) -> None:
        models.clear()
        gc.collect()

    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(drop_the_model),
        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None),
    ]
    plain(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    for handle in handles:
        handle.remove()


@on_ranks(2)
def test_a_fused_step_makes_unsharded_parameters_stale() -> None:
    """Version counters do not see it; parameters that stay unsharded are gathered again
    nevertheless.
    """
    model = stack(5, 3)
    shardgrad.fully_shard(model, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x = SHARDGRAD.inputs(0, 5)
    before = model(x)
    before.sum().backward()
    optimizer.step()
    weight, bias = (param.full_tensor() for param in optimizer.param_groups[0]["params"])
    after = model(x)
    assert torch.equal(after, nn.functional.linear(x, weight, bias))
    assert not torch.equal(after, before)
