"""Backwards that make a graph (`create_graph=True`): what reads parameters again finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.parity import Engine, Tensors, as_unsharded
from tests.support.ranks import on_ranks

WIDTH = 6


def pre_norm(engine: Engine, **options: Any) -> nn.Sequential:
    """A norm first: its kernel reads a weight whose memory is gone without a check."""
    torch.manual_seed(0)
    layers = [
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH),
    ]
    model = nn.Sequential(*layers)
    for i in (0, 1, 3):
        engine.fully_shard(model[i], **options)
    engine.fully_shard(model, **options)
    return model


class Force(nn.Module):
    """Differentiates a unit in its forward, and has a parameter of its own to use afterwards."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.energy = pre_norm(engine)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = self.energy(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy * self.scale + force * self.scale


@on_ranks(2)
@as_unsharded
def test_a_forward_may_differentiate_a_part_of_the_model(engine: Engine) -> Tensors:
    model = engine.fully_shard(Force(engine))
    for step in range(2):
        with torch.no_grad():
            model(batch(engine, step))
        per_row(model(batch(engine, step))).backward()
    return engine.snapshot(model)


def batch(engine: Engine, step: int) -> Tensor:
    return engine.inputs(step, WIDTH).requires_grad_()


def per_row(value: Tensor) -> Tensor:
    """Sums over columns and averages over rows: the mean over ranks is that of the whole batch."""
    return value.square().sum(1).mean()


def slope(model: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]


def on_inputs(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (per_row(y) + per_row(g)).backward()


def after_another_forward(model: Any, x: Tensor) -> None:
    g = slope(model, x)
    with torch.no_grad():
        model(x)
        model[1](x)  # gathers only itself again
    per_row(g).backward()  # the graph reads parameters before a hook could gather them


def beside_another_forward(model: nn.Module, x: Tensor) -> None:
    g = slope(model, x)
    with torch.no_grad():
        model(x + 1)
    (per_row(g) + per_row(model(x - 1))).backward()


def of_third_order(model: nn.Module, x: Tensor) -> None:
    g = slope(model, x)
    (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    (per_row(g) + 0.1 * per_row(h)).backward()


def over_a_kept_graph(model: nn.Module, x: Tensor) -> None:
    g = slope(model, x)
    (v,) = torch.autograd.grad(g.sum(), x, retain_graph=True)
    (w,) = torch.autograd.grad((g * v).sum(), x, retain_graph=True)
    (g * (v + w)).sum(1).mean().backward()


def in_turn(model: nn.Module, x: Tensor) -> None:
    g, h = slope(model, x), slope(model, 2 * x)
    per_row(g).backward()
    torch.autograd.grad(model(x).sum(), x)  # has a graph of its own
    per_row(h).backward()


def accumulated_with_a_graph(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    per_row(y).backward(create_graph=True)
    x.grad = None
    per_row(model(x)).backward()


# Units hear nothing of a backward from the tensors of a transform of `torch.func`.


def by_a_transform(model: nn.Module, x: Tensor) -> None:
    g = torch.func.grad(lambda x: model(x).square().sum())(x)
    (per_row(model(x - 1)) + per_row(g)).backward()


def of_each_row(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.func.vmap(model)(x)
    g = torch.func.vmap(torch.func.grad(lambda row: model(row).square().sum()))(x)
    per_row(g).backward()


def along_a_direction(model: nn.Module, x: Tensor) -> None:
    y, tangent = torch.func.jvp(model, (x,), (x.detach() + 1,))
    (per_row(y) + per_row(tangent)).backward()


PENALTIES = [
    on_inputs,
    after_another_forward,
    beside_another_forward,
    of_third_order,
    over_a_kept_graph,
    in_turn,
    accumulated_with_a_graph,
    by_a_transform,
    of_each_row,
    along_a_direction,
]


@pytest.mark.parametrize("reshards", [None, True, False])
@pytest.mark.parametrize("penalty", PENALTIES)
@on_ranks(2)
@as_unsharded
def test_a_gradient_penalty_trains_like_the_unsharded_model(
    engine: Engine, penalty: Callable[[nn.Module, Tensor], None], reshards: bool | None
) -> Tensors:
    model = pre_norm(engine, reshard_after_forward=reshards)
    optim = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        optim.zero_grad()
        penalty(model, batch(engine, step))
        if not engine.whole_batch:
            assert all(isinstance(p, DTensor) for p in model.parameters())  # nothing stays whole
        optim.step()
    return engine.snapshot(model)


@on_ranks(2)
@as_unsharded
def test_a_penalty_of_a_block_that_runs_before_its_root_equals_an_unsharded_run(
    engine: Engine,
) -> Tensors:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    engine.shard(model[1], model)
    x = batch(engine, 0)
    grad = slope(model[1], x)
    (per_row(model(batch(engine, 1))) + per_row(grad)).backward()
    return engine.snapshot(model)
