"""`model.parameters()` shows the parameters that have gradients, whatever came before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardgrad
from shardgrad.errors import UnsupportedError
from tests.support.parity import SHARDGRAD, mlp, sharded_mlp
from tests.support.ranks import on_ranks
from tests.support.under_patch import whole

X = torch.ones(4, 6).double()


def evaluation_that_fails(model: nn.Module) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bad batch")

    (model(X) * 100).square().mean().backward()
    hook = model[1].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(ValueError, match="a bad batch"):
        model(X)
    hook.remove()


def evaluation_after_a_layer_of_it(model: nn.Module) -> None:
    (model(X) * 100).square().mean().backward()
    with torch.no_grad():
        model[3](X)  # outside of the forward of the root, which owns it
        model(X)


def backward_that_makes_a_graph(model: nn.Module) -> None:
    (model(X) * 100).square().mean().backward(create_graph=True)


def metric_that_makes_a_graph(model: nn.Module) -> None:
    (model(X) * 100).square().mean().backward()
    x = X.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].norm()


def backward_that_keeps_parameters(model: nn.Module) -> None:
    if isinstance(model, shardgrad.FSDPModule):
        model.set_reshard_after_backward(False)
    (model(X) * 100).square().mean().backward()


def clipped_step(model: nn.Module, program: Callable[[nn.Module], None]) -> list[Tensor]:
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    program(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    assert all(param.grad is None for param in params)
    return [whole(norm), *map(whole, params)]


@pytest.mark.parametrize(
    "program",
    [
        evaluation_that_fails,
        evaluation_after_a_layer_of_it,
        backward_that_makes_a_graph,
        metric_that_makes_a_graph,
        backward_that_keeps_parameters,
    ],
    ids=lambda each: each.__name__,
)
@on_ranks(2)
def test_torchs_clipping_finds_every_gradient(program: Callable[[nn.Module], None]) -> None:
    torch.testing.assert_close(clipped_step(sharded_mlp(), program), clipped_step(mlp(), program))


class Encoder(nn.Module):
    """Its forward calls a method of its own, and then a layer that no other unit has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        with suppress(RuntimeError):
            self.features(x[:, 1:])  # of another size: what fails may be tried in another way
        features = self.features(x)
        self.state_dict()  # which reshards
        return self.head(features)


@on_ranks(2)
def test_a_forward_may_call_a_registered_method_and_reshard() -> None:
    plain, model = Encoder(), Encoder()
    SHARDGRAD.shard(model.body, model)
    shardgrad.register_fsdp_forward_method(model, "features")
    model(X).square().mean().backward()
    with torch.no_grad():
        torch.testing.assert_close(model(X), plain(X))


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.ones(3, 6).double())

    def forward(self) -> Tensor:
        return self.queries.unsqueeze(0)


@on_ranks(2)
def test_a_unit_that_returns_a_view_of_its_parameter_is_refused_in_forward() -> None:
    model = Queries()
    shardgrad.fully_shard(model, reshard_after_forward=True)
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode, pytest.raises(UnsupportedError, match=r"fix|try: .*parameter.clone\(\)"):
            model()
    kept = Queries()
    shardgrad.fully_shard(kept, reshard_after_forward=False)
    kept().sum().backward()
    torch.testing.assert_close(whole(kept.queries.grad), torch.ones(3, 6).double())
