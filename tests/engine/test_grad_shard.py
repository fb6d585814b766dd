"""A gradient is a DTensor over one address for the life of the model, and None keeps its
meaning.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardgrad
from tests.support.parity import (
    SHARDGRAD,
    stack,
)
from tests.support.ranks import on_ranks


class Partly(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("switch", [None, False, True])
@on_ranks(2)
def test_a_parameter_no_rank_uses_keeps_none_and_does_not_decay(switch: bool | None) -> None:
    """Whatever `set_reduce_scatter_unused_params` says: FSDP2 makes zeros of None with it."""
    torch.manual_seed(0)
    model = Partly()
    before = model.unused.weight.detach().clone()
    SHARDGRAD.fully_shard(model)
    if switch is not None:
        model.set_reduce_scatter_unused_params(switch)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(2):
        model(SHARDGRAD.inputs(step, 5)).square().mean().backward()
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


@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
@on_ranks(2)
def test_reduced_gradients_have_the_dtype_and_the_name_of_the_policy(decoupled: bool) -> None:
    model = stack(5, 7, 3).to(torch.bfloat16)
    policy = shardgrad.GradientPolicy(dtype=torch.float32, decoupled=decoupled)
    shardgrad.fully_shard(model, gradient_policy=policy)
    plain = stack(5, 7, 3).to(torch.bfloat16)
    x = SHARDGRAD.inputs(0, 5, dtype=torch.bfloat16)
    for _ in range(2):
        model(x).square().mean().backward()
    plain(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if decoupled:
            assert ours.grad is None
        grad = ours.decoupled_grad if decoupled else ours.grad
        assert isinstance(grad, DTensor)
        assert grad.dtype == grad.to_local().dtype == torch.float32
        assert ours.dtype == torch.bfloat16
        right = theirs.grad.float()
        # The sum of two ranks' means, twice accumulated, halved.
        torch.distributed.all_reduce(right)
        assert torch.equal(grad.full_tensor(), right)
