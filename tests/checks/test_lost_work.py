"""What an optimizer step would lose is refused: gradients that were not reduced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardgrad.errors import GradientError
from tests.support.parity import SHARDGRAD, assert_same_bits, stack
from tests.support.ranks import on_ranks


def backward(model: nn.Module) -> None:
    model(torch.randn(3, 4)).square().mean().backward()


@on_ranks(2)
def test_a_step_before_the_reduction_is_refused() -> None:
    model = SHARDGRAD.shard_stack(stack(4, 6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = SHARDGRAD.snapshot(model)
    model.set_requires_gradient_sync(False)
    backward(model)
    with pytest.raises(GradientError, match=r"unreduced gradients of 0\.weight, 0\.bias"):
        optimizer.step()
    model.zero_grad()
    optimizer.step()
    assert_same_bits(SHARDGRAD.snapshot(model), before)
    model[0].set_requires_gradient_sync(True)
    backward(model)
    optimizer.step()  # the program has chosen a unit that waits
