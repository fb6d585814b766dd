"""A gradient is a DTensor over one address for the life of the model, and None keeps its
meaning.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.parity import (
    SHARDGRAD,
    Half,
    stack,
)
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("switch", [None, False, True])
@on_ranks(2)
def test_a_parameter_no_rank_uses_keeps_none_and_does_not_decay(switch: bool | None) -> None:
    """Whatever `set_reduce_scatter_unused_params` says: FSDP2 makes zeros of None with it."""
    torch.manual_seed(0)
    model = Half()
    before = model.unused.weight.detach().clone()
    SHARDGRAD.fully_shard(model)
    if switch is not None:
        model.set_reduce_scatter_unused_params(switch)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(2):
        SHARDGRAD.loss(model, step, 5).backward()
        assert model.unused.weight.grad is None
        assert model.unused.bias.grad is None
        assert model.used.weight.grad is not None
        optim.step()
        optim.zero_grad()
    assert torch.equal(model.unused.weight.full_tensor(), before)
    assert model.unused.weight not in optim.state


@on_ranks(2)
def test_an_assigned_gradient_moves_to_the_fixed_address_and_a_kept_one_stays() -> None:
    model = SHARDGRAD.fully_shard(stack(5, 7, 3))
    weight = model[0].weight
    x = SHARDGRAD.inputs(0, 5)
    model(x).square().mean().backward()
    address, once = weight.grad.to_local().data_ptr(), weight.grad.to_local().clone()
    weight.grad = foreign = weight.grad.clone()
    model(x).square().mean().backward()
    assert weight.grad is not foreign
    assert weight.grad.to_local().data_ptr() == address
    kept, before = weight.grad, weight.grad.to_local().clone()
    weight.grad = kept.clone()
    model(x).square().mean().backward()
    assert torch.equal(kept.to_local(), before)
    assert torch.equal(weight.grad.to_local(), before + once)
