"""How a program may call its modules: repeatedly, partly, by keyword, in evaluation, and what it
returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardgrad
from shardgrad.errors import ForeignParameterError
from tests.support.parity import (
    SHARDGRAD,
    Engine,
    Tensors,
    as_unsharded,
    stack,
    train,
    train_squares,
)
from tests.support.ranks import on_ranks
from tests.support.traps import Trap

# -- what goes in and comes out


class Unseen:
    """Torch does not look into it."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


def hooked(layer: Layer) -> Tensor:
    """Returns a tensor with a hook that reads the layer's weight in backward."""
    layer.values = layer.values.clone()
    if layer.values.requires_grad:
        layer.values.register_hook(lambda grad: grad * layer.linear.weight.mean())
    return layer.values


GIVE: dict[str, Callable[[Layer], object]] = {
    "nothing": lambda _: None,
    "an object": lambda layer: Unseen(layer.values),
    "a view that is changed in place": lambda layer: layer.values,
    "a tensor with a hook": hooked,
}


class Layer(nn.Module):
    """Leaves a view, which backward needs its weight for, in an attribute, and returns `give` of
    it.
    """

    def __init__(self, give: str) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.give = GIVE[give]

    def forward(self, x: Tensor) -> object:
        self.values = (self.linear(x)[None] * self.linear.weight.square().mean()).squeeze(0)
        return self.give(self)


class Layers(nn.Module):
    def __init__(self, give: str) -> None:
        super().__init__()
        self.a, self.b, self.head = Layer(give), Layer(give), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            layer(x)
            x = layer.values.mul_(2)
        return self.head(x)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("give", GIVE)
@on_ranks(2)
@as_unsharded
def test_backward_finds_the_weights_of_a_unit_whatever_it_returns(
    engine: Engine, give: str, trains: bool
) -> Tensors:
    torch.manual_seed(0)
    model = Layers(give)
    model.b.requires_grad_(trains)
    engine.shard(model.a, model.b, model, reshard_after_forward=True)

    def loss(number: int) -> Tensor:
        found = engine.loss(model, number, 5)
        with torch.no_grad():
            engine.loss(model, number, 5)
        found.backward(retain_graph=True)  # the first of two
        return found

    return train(engine, model, loss=loss)


@dataclass
class Result:
    """An output that cannot be built again from its fields."""

    values: Tensor
    mean: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mean = self.values.mean(1, keepdim=True)


class Tells(nn.Linear):
    """Writes to an argument and takes from it, before and after it calls itself, once."""

    def forward(self, x: Tensor, told: dict[str, Any]) -> Any:
        told.pop("taken", None)
        told["in turn"][0].append(x)
        if told.keys() == {"root", "in turn"}:
            told["again"] = x
            self(x, told)
        told[f"unit {len(told)}"] = x
        return Result(super().forward(x))


class Told(nn.Module):
    """Reads what its parts have written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (Tells(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        narrow = x.float().requires_grad_()
        told: dict[str, Any] = {"root": narrow, "taken": x, "in turn": ([],)}
        result = self.third(self.second(self.first(x, told).values, told).values, told)
        assert told["root"] is narrow
        assert "taken" not in told
        written = sum(told["in turn"][0], told["unit 6"])
        return result.mean * told["unit 4"] * told["unit 5"] + written


@on_ranks(2)
@as_unsharded
def test_a_part_writes_to_its_arguments_and_returns_what_it_likes(engine: Engine) -> Tensors:
    """A unit, and parts of the root outside of its forward, before and after it is unsharded."""
    torch.manual_seed(0)
    model, policy = Told(), MixedPrecisionPolicy(torch.float64)  # which casts what is narrow
    engine.shard(model.first, model, mp_policy=policy)
    return train(engine, model, loss=lambda number: engine.loss(model.forward, number, 5))


class Notes(nn.Linear):
    """Notes in a list that the part inside of it has run."""

    def __init__(self, inner: Callable[..., Tensor]) -> None:
        super().__init__(4, 4)
        vars(self)["inner"] = inner  # registered elsewhere

    def forward(self, x: Tensor, told: list[Any]) -> Tensor:
        y = self.inner(x, [x])
        told.append("inside")
        return super().forward(y)


@on_ranks(1)
def test_what_a_part_writes_reaches_its_caller_whatever_other_calls_write_or_raise() -> None:
    inner = Notes(lambda x, _: x)
    model = shardgrad.fully_shard(nn.Sequential(inner, Notes(inner)))
    x = torch.ones(2, 4, requires_grad=True)
    failed: list[Any] = [x]
    for _ in range(2):
        told: list[Any] = [x]
        with suppress(RuntimeError):
            inner(x[:, 1:], failed)
        failed[:] = ["by the program"]
        model[1](x, told)
        assert (told[1:], failed) == (["inside"], ["by the program"])


class Forgiving(nn.Linear):
    """Calls itself, and goes on if that fails."""

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        if fails:
            raise Trap
        with suppress(Trap):
            self(x, fails=True)
        return super().forward(x)


@on_ranks(2)
@as_unsharded
def test_a_forward_goes_on_after_a_call_of_its_own_module_has_failed(engine: Engine) -> Tensors:
    torch.manual_seed(0)
    model = engine.shard(Forgiving(5, 3))
    return train_squares(engine, model, 5)


class Task(nn.Module):
    """A head over an encoder that another task has, too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)).square().mean()


@pytest.mark.parametrize("together", [False, True], ids=["in turns", "in one backward"])
@on_ranks(2)
@as_unsharded
def test_one_encoder_under_two_roots_equals_an_unsharded_run(
    engine: Engine, *, together: bool
) -> Tensors:
    """Two roots have one encoder, which is under the one that ran last."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7))
    tasks = nn.ModuleList([Task(encoder), Task(encoder)])
    engine.shard(encoder[0], encoder, *tasks)

    def loss(number: int) -> Tensor:
        x = engine.inputs(number, 5)
        first = tasks[0](x)
        if together:
            return first + tasks[1](x)
        first.backward()
        return tasks[1](x)

    return train(engine, tasks, loss=loss)


@on_ranks(2)
def test_a_parameter_that_an_operation_has_made_is_refused() -> None:
    model = stack(5, 7, 3)
    SHARDGRAD.shard(model[0], model)
    x = torch.ones(2, 5)
    model(x).sum().backward()
    before = [param.full_tensor() for param in model.parameters()]
    model.reshard()
    moved = {name: param * 1.01 for name, param in model.named_parameters()}
    with pytest.raises(
        ForeignParameterError, match="result of an operation, which would get no gradient"
    ):
        torch.func.functional_call(model, moved, (x,))
    model(x).sum().backward()
    for param, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), was)


@pytest.mark.parametrize("runs_first", [False, True])
@pytest.mark.parametrize("are_leaves", [False, True])
@on_ranks(2)
def test_tensors_that_functional_call_puts_in_the_place_of_parameters_get_their_gradients(
    *, runs_first: bool, are_leaves: bool
) -> None:
    """Meta-learning: the loss after a step that is differentiated itself."""
    plain, model = stack(5, 7, 3), stack(5, 7, 3)
    units = [shardgrad.fully_shard(model[0]), shardgrad.fully_shard(model)]
    x = torch.ones(2, 5)
    if runs_first:
        model(x).sum().backward()
        model.zero_grad()
    for unit in units:
        unit.unshard()
    found = []
    for each in (plain, model):
        leaves = {name: (p.detach() / 2).requires_grad_() for name, p in plain.named_parameters()}
        fast = leaves if are_leaves else {name: p * 2 for name, p in leaves.items()}
        loss = torch.func.functional_call(each, fast, (x,)).square().mean()
        found.append([loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@on_ranks(2)
def test_a_dict_of_parameters_serves_functional_call_in_every_step() -> None:
    """It hands back what a forward has left registered, which are unsharded parameters."""
    models = stack(5, 7, 3), stack(5, 7, 3)
    for model in models:
        SHARDGRAD.shard(model[0], model)
    called, model = models
    params = dict(model.named_parameters())
    for step in range(3):
        x = torch.full((2, 5), step + 1.0)
        called(x).square().mean().backward()
        torch.func.functional_call(model, params, (x,)).square().mean().backward()
        for expected, got in zip(called.parameters(), model.parameters(), strict=True):
            assert torch.equal(expected.grad.full_tensor(), got.grad.full_tensor())
