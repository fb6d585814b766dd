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
from tests.support.ranks import Ranks, on_ranks


@pytest.fixture(scope="module", autouse=True)
def _workers_without_models(worlds: dict[int, Ranks]) -> None:
    """Earlier tests may have left models alive in their workers."""
    worlds[2].stop()


def hooks() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(
        torch_optimizer._global_optimizer_post_hooks
    )


def backward(model: nn.Module) -> None:
    model(SHARDGRAD.inputs(0, 5)).square().mean().backward()


@on_ranks(2)
def test_hooks_live_and_die_with_sharded_models() -> None:
    gc.collect()
    assert hooks() == 0, "an earlier test's model is alive"
    one, other = SHARDGRAD.fully_shard(stack(5, 3)), SHARDGRAD.fully_shard(stack(5, 3))
    assert hooks() == 2, "one before steps and one after them, whatever the number of models"
    backward(one)
    del one
    gc.collect()
    assert hooks() == 2
    del other
    gc.collect()
    assert hooks() == 0
    again = SHARDGRAD.fully_shard(stack(5, 3))
    assert hooks() == 2
    del again
    gc.collect()
    assert hooks() == 0


@on_ranks(2)
def test_an_optimizer_is_looked_at_again_after_its_parameters_were_sharded() -> None:
    """An optimizer that had nothing to do with any model, until its parameters were sharded."""
    kept = SHARDGRAD.fully_shard(stack(5, 3))  # so that hooks are there from the beginning
    model = stack(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    SHARDGRAD.fully_shard(model)
    backward(model)
    with pytest.raises(OptimizerParameterError, match="before fully_shard"):
        optimizer.step()
    assert kept is not None


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
    assert hooks() == 2 + len(handles), "left, with nothing to do"
    for handle in handles:
        handle.remove()
    model = SHARDGRAD.fully_shard(stack(5, 3))
    assert hooks() == 2
    del model
    gc.collect()
    assert hooks() == 0


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
