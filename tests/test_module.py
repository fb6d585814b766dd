"""The methods of a sharded module, hooks on its parameters, clipping, scaling and compilation."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.parity import (
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    token_loss,
    tower,
    train,
)
from tests.support.ranks import on_ranks


def is_sharded(module: nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in module.parameters(recurse=False))


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_unshard_shows_whole_parameters_until_reshard(stage: int) -> None:
    whole = tower()
    model = SHARDGRAD.shard_tower(tower(), zero_stage=stage)
    assert model.unshard() is None
    assert torch.equal(model.head.weight, whole.head.weight)
    assert isinstance(model.layers[0].up.weight, DTensor)  # not recursive
    model.reshard()
    assert is_sharded(model.head)
    handle = model.layers[0].unshard(async_op=True)
    handle.wait()
    assert torch.equal(model.layers[0].up.weight, whole.layers[0].up.weight)
    model.layers[0].reshard()
    handle.wait()  # once is enough
    assert is_sharded(model.layers[0].up)
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    model.gain = nn.Parameter(model.gain.detach() * 2)
    handle = model.unshard(async_op=True)
    torch.optim.SGD(model.parameters(), lr=1.0, foreach=True).step()
    right = model.head.weight.full_tensor()
    handle.wait()
    assert torch.equal(model.head.weight, right)
    assert torch.equal(model.gain, whole.gain * 2)


@on_ranks(2)
def test_a_unit_unsharded_by_hand_stays_so_from_forward_to_backward() -> None:
    model = SHARDGRAD.shard_tower(tower(), reshard_after_forward=True)
    held, other = model.layers[0], model.layers[1]
    held.unshard(async_op=True).wait()
    with torch.no_grad():
        token_loss(model, SHARDGRAD.tokens(0))
    assert is_sharded(held.up)
    held.unshard(async_op=True).wait()
    loss = token_loss(model, SHARDGRAD.tokens(0))
    assert not is_sharded(held.up)
    assert is_sharded(other.up)
    loss.backward()
    assert is_sharded(held.up)
    token_loss(model, SHARDGRAD.tokens(0))
    assert is_sharded(held.up)


@on_ranks(2)
def test_unsharding_many_units_ahead_waits_for_no_other_rank() -> None:
    model = SHARDGRAD.shard_tower(tower())
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 has unsharded"], timedelta(seconds=60))
    handles = [layer.unshard(async_op=True) for layer in model.layers]
    store.set("rank 0 has unsharded", "")
    for handle in handles:
        handle.wait()


@pytest.mark.parametrize("recurse", [True, False])
@on_ranks(2)
def test_set_reshard_after_forward_reaches_inner_units_if_asked_to(recurse: bool) -> None:
    model = SHARDGRAD.shard_tower(tower(), reshard_after_forward=True)
    model.set_reshard_after_forward(False, recurse=recurse)
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    token_loss(model, SHARDGRAD.tokens(1))
    assert not is_sharded(model.head)
    assert is_sharded(model.layers[0].up) is not recurse


@on_ranks(2)
@as_under_fsdp2
def test_a_penalty_of_sharded_weights_after_the_forward_trains_like_fsdp2(
    engine: Engine,
) -> Tensors:
    model = engine.shard_tower(tower())

    def loss(number: int) -> torch.Tensor:
        squares = [p.full_tensor().square().sum() for p in model.layers.parameters()]
        return token_loss(model, engine.tokens(number)) + 0.1 * sum(squares)

    return train(engine, model, loss=loss)
