"""What a step reads without being given it, and the line of the program that raised."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from shardgrad.graphs.closed_over import NUMBERS, Place, closed_over
from shardgrad.graphs.program_line import line_that_raised

targets = torch.zeros(2)  # of the steps below, as a global variable


class Trainer:
    """A program's own object, with the batch in its attributes."""

    def __init__(self) -> None:
        self.batch = {"targets": torch.ones(2)}

    def step(self) -> torch.Tensor:
        return self.batch["targets"] * 2

    __call__ = step


class Masked(nn.Module):
    """A module with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self._mask = torch.ones(2)

    def forward(self) -> torch.Tensor:
        return self._mask * 2


def reads_a_global() -> torch.Tensor:
    return targets * 2


@dataclass(frozen=True, slots=True)
class Slots:
    """Its attributes are in no dictionary, and only the whole may be replaced."""

    mask: torch.Tensor


class Base:
    """Its slot has a private name."""

    __slots__ = "__mask"

    def masked(self) -> torch.Tensor:
        return self.__mask * 2


class Derived(Base):
    """Its slot is in the base class."""

    __slots__ = ()

    def __init__(self) -> None:
        self._Base__mask = torch.ones(2)


class Settings:
    """Its class has what its objects read, and code that reads a global variable."""

    scale = torch.ones(2)

    def scaled(self) -> torch.Tensor:
        return targets * 2

    @property
    def as_property(self) -> torch.Tensor:
        return self.scaled()

    @classmethod
    def of_class(cls) -> torch.Tensor:
        return cls.scale * 2


@torch.no_grad()
def without_gradients() -> torch.Tensor:
    return targets * 2


def with_a_bias() -> Any:
    return vars(with_a_bias)["bias"] * 2


vars(with_a_bias)["bias"] = torch.ones(2)


class Scaled(torch.autograd.Function):
    """An operation with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * targets


def steps() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yields where a step finds a tensor, the name of the place, and the step."""
    yield "in_a_global", "targets", reads_a_global
    mine = torch.ones(2)
    yield "in_a_closure", "mine", lambda: mine * 2
    trainer = Trainer()
    yield "in_an_object", "trainer.batch['targets']", lambda: trainer.batch["targets"] * 2
    yield "in_the_object_of_a_method", "self.batch['targets']", trainer.step
    yield "in_a_callable_object", "self.batch['targets']", trainer
    model = nn.Sequential(Masked())
    yield "in_a_module", "model.0._mask", lambda: model[0]() + 1
    partial = functools.partial(lambda given: given["mask"] * 2, {"mask": torch.ones(2)})
    yield "in_a_partial", "self.args[0]['mask']", partial
    slots = Slots(torch.ones(2))
    yield "in_a_slot", "slots.mask", lambda: slots.mask * 2
    derived = Derived()
    yield "in_a_slot_of_a_base_class", "derived._Base__mask", lambda: derived.masked()
    package: Any = ModuleType("package")
    package.part = ModuleType("package.part")
    package.part.mask = torch.ones(2)
    yield "in_a_module_of_a_package", "package.part.mask", lambda: package.part.mask * 2
    yield "in_an_attribute_of_a_function", "with_a_bias.bias", lambda: with_a_bias()
    yield "in_a_class", "Settings.scale", lambda: Settings.of_class()
    settings = Settings()
    yield "in_a_method_that_a_property_calls", "targets", lambda: settings.as_property + 1
    yield "in_a_function_that_torch_wraps", "targets", lambda: without_gradients()
    yield "in_a_function_of_autograd", "targets", lambda: Scaled.apply(torch.ones(2))
    steered, steering = nn.Identity(), torch.ones(2)
    steered.register_forward_hook(lambda module, args, output: output * steering)
    yield "in_a_hook", "steering", lambda: steered(torch.ones(2))
    param = nn.Parameter(torch.ones(2))
    averages = {param: torch.ones(2)}
    yield "by_a_key_that_is_no_number", "averages[Parameter]", lambda: averages[param] * 2


def places_of(step: Callable[[], Any], *objects: Any) -> dict[Place, Any]:
    """Returns the places of tensors that a step closes over, with what is there."""
    found = closed_over(step, objects)
    return {place: place.key() for place, value in found if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(("where", "name", "step"), list(steps()))
def test_a_tensor_that_is_replaced_between_steps_is_named_where_the_step_finds_it(
    where: str, name: str, step: Callable[[], Any]
) -> None:
    step()
    place, before = one_of(step, name)
    holder = place.holder()
    holder.put(copy.deepcopy(holder.found()))
    _, after = one_of(step, name)
    # The place of the first step shows what is there now.
    assert place.key() == after != before, where


def one_of(step: Callable[[], Any], name: str) -> tuple[Place, Any]:
    """Returns the place with this name, and its key."""
    return next((place, key) for place, key in places_of(step).items() if place.name == name)


def test_the_parts_of_an_object_have_a_place_on_each_way_to_it() -> None:
    mask = nn.Linear(2, 2)
    held, named = {"mask": mask}, [mask]
    found = places_of(lambda: (mask, held["mask"], named[0]))
    assert {"mask.weight", "held['mask'].weight", "named[0].weight"} <= {p.name for p in found}
    held["mask"] = nn.Linear(2, 2)  # another one, of a submodule's owner alone
    changed = {place.name for place, key in found.items() if place.key() != key}
    assert changed == {"held['mask'].weight", "held['mask'].bias"}


def test_a_tensor_of_an_object_among_the_arguments_is_found() -> None:
    held = Slots(torch.ones(2))
    ((place, before),) = places_of(lambda: None, held).items()
    object.__setattr__(held, "mask", torch.ones(2))
    assert (place.name, place.key() == before) == ("Slots.mask", False)


def test_what_a_tensor_of_the_host_holds_is_read_as_where_it_lies() -> None:
    factor = torch.tensor(0.5)
    ((place, before),) = places_of(lambda: torch.ones(2) * factor).items()
    factor.fill_(2)
    assert place.key() != before
    factor.fill_(0.5)
    assert place.key() == before
    factor.resize_(3)  # which a storage that numpy has seen refuses


def test_variables_of_one_name_are_several_places() -> None:
    def scale(factor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: x * factor

    up, down = scale(torch.ones(2)), scale(torch.ones(2))
    places = places_of(lambda: down(up(torch.ones(2))))
    assert [place.name for place in places] == ["factor", "factor"]
    assert len(set(places.values())) == 2


def test_a_place_to_which_no_way_leads_any_more_has_no_key() -> None:
    held: dict[str, Any] = {"a": {"b": torch.ones(2)}}
    (place,) = places_of(lambda: held["a"]["b"] * 2)
    assert place.key() != ((), b"")
    for gone in ({"b": 3}, {}, None):
        held["a"] = gone
        assert place.key() == ((), b"")


def test_numbers_that_a_step_closes_over_have_names() -> None:
    rate, held = 0.5, {"on": True}
    found = closed_over(lambda: rate if held["on"] else None, [])
    numbers = {place.name: value for place, value in found if isinstance(value, NUMBERS)}
    assert numbers == {"rate": 0.5, "held['on']": True, "held[...]": 1}


def test_large_and_circular_objects_are_looked_through_in_part() -> None:
    numbers: list[Any] = [torch.ones(1) for _ in range(5_000)]
    numbers[0] = numbers
    near = torch.ones(2)
    found: dict[Place, Any] = dict(closed_over(lambda: (numbers, near), []))
    assert any(tensor is near for tensor in found.values())
    assert 500 < len(found) < 5_000


# -- the line that raised


class Raises(nn.Module):
    """A layer whose forward, or a hook of whose backward, raises."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(2, 2), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.where == "forward":
            torch.ones(2) + torch.ones(3)
        y.register_hook(refuse)
        return y


def refuse(grad: torch.Tensor) -> None:
    raise RuntimeError("refused")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("forward", r"module 1, .*test_closed_over\.py:\d+ in forward: torch\.ones\(2\) \+"),
        ("backward", r".*test_closed_over\.py:\d+ in refuse: raise RuntimeError"),
    ],
)
def test_an_error_is_named_with_the_innermost_line_and_its_module(
    where: str, expected: str
) -> None:
    model = nn.Sequential(nn.Identity(), Raises(where))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2)).sum().backward()
    assert re.match(expected, line_that_raised(caught.value, [model]))


def test_an_error_outside_of_the_program_has_no_line() -> None:
    assert line_that_raised(RuntimeError("made, and not raised"), []) == ""
