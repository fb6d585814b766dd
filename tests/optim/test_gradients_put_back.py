"""A gradient that is taken out, put back or exchanged is what `param.grad` says when it is read."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardgrad
from tests.support.parity import mlp, sharded_mlp
from tests.support.ranks import on_ranks
from tests.support.under_patch import whole

LR = 0.1


def backward(model: nn.Module, fill: float = 1.0) -> None:
    """The same data on every rank, so that plain torch is the oracle."""
    model(torch.full((4, 6), fill).double()).square().mean().backward()


def exchanged(one: nn.Module, other: nn.Module, optim: Any, *, again: bool) -> list[Tensor]:
    for model, fill in ((one, 1.0), (other, 2.0)):
        backward(model, fill)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        a.grad, b.grad = b.grad, a.grad
    weights = [layer.weight for layer in one]
    grads = [weight.grad for weight in weights]
    for weight, grad in zip(weights, grads[1:] + grads[:1], strict=True):
        weight.grad = grad
    if again:
        backward(one)
        backward(other)
    params = list(chain(one.parameters(), other.parameters()))
    optim(params, lr=LR).step()
    return [whole(param) for param in params]


@pytest.mark.parametrize("again", [False, True], ids=["step", "backward_and_step"])
@on_ranks(2)
def test_gradients_exchanged_between_models_and_around_layers_are_all_read_first(
    again: bool,
) -> None:
    right = exchanged(mlp(), mlp(), torch.optim.SGD, again=again)
    for optim in (torch.optim.SGD, shardgrad.optim.SGD):
        found = exchanged(sharded_mlp(), sharded_mlp(), optim, again=again)
        torch.testing.assert_close(found, right)
