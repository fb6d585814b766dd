"""Hyperparameters that kernels read from device memory.

[Note: Hyperparameters]
An optimizer's group is a dictionary, and programs and schedulers assign to it:
`group["lr"] = 1e-4`. If a kernel took such a number as an argument, a captured graph would freeze
it. So each group has a mirror in device memory, which every assignment writes and which kernels
read. The next launch or replay uses the new value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, count
from numbers import Real
from typing import Any

import torch

from shardgrad.engine.streams import is_capturing
from shardgrad.errors import CaptureError, OptionError


def at_least_zero(value: Any) -> Sequence[float]:
    """Returns a finite number >= 0 as the kernel wants it; raises ValueError for any other."""
    number = math.nan
    if isinstance(value, Real):
        with suppress(OverflowError):  # a large integer is a number, but no float
            number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError("a finite number that is not negative")
    return (number,)


def fraction(value: Any) -> Sequence[float]:
    """Returns a number in [0, 1); raises ValueError for any other."""
    (number,) = at_least_zero(value)
    if number >= 1:
        raise ValueError("a number at least 0 and below 1")
    return (number,)


def fractions(value: Any) -> Sequence[float]:
    """Returns a pair of numbers in [0, 1); raises ValueError for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError("a pair of numbers, each at least 0 and below 1")
    return (*fraction(value[0]), *fraction(value[1]))


@dataclass(frozen=True)
class Hyper:
    """One hyperparameter: its name in the group, and its valid values.

    Attributes:
        name: the group's key.
        read: converts a host value to the mirror's numbers, or raises a ValueError with the
            expected values.
        may_be_tensor: the value may be a one-element tensor. It is copied to the mirror at every
            step, so that in-place changes take effect.
        count: how many numbers it has in the mirror.
    """

    name: str
    read: Callable[[Any], Sequence[float]]
    may_be_tensor: bool = False
    count: int = 1

    def numbers(self, value: Any) -> Sequence[float] | None:
        """Returns the mirror's numbers, or None if the value is a tensor.

        Streams: outside a capture the host waits for a tensor's value, to check its range.

        Raises:
            OptionError: the value is outside its range.
        """
        is_tensor = isinstance(value, torch.Tensor) and self.may_be_tensor and value.numel() == 1
        if is_tensor and (value.is_meta or is_capturing(value.device)):
            return None
        try:
            numbers = self.read(value.item() if is_tensor else value)
            return None if is_tensor else numbers
        except ValueError as error:
            raise OptionError(
                f"the optimizer's {self.name} is outside its range",
                expected=str(error),
                got=repr(value),
                fix=f"{self.name}=..., or group[{self.name!r}] = ... later",
            ) from None


_numbers = count()


class OptimGroup(dict[str, Any]):
    """One entry of `optimizer.param_groups`: a dictionary whose hyperparameters are mirrored on the
    device.

    Args:
        values: the plain dictionary that torch made.
        hypers: the keys that are mirrored.
        fixed: the keys that are host arguments of a launch. Other values need another graph.
        validate: gets the values that the group was built with and those it would have. Raises an
            OptionError for a combination that is not allowed.

    Attributes:
        number: an id of this group, and so of its mirrors, that is unique in the process.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        hypers: Sequence[Hyper],
        fixed: Sequence[str],
        validate: Callable[[Mapping[str, Any], Mapping[str, Any]], None],
    ) -> None:
        self._hypers = {hyper.name: hyper for hyper in hypers}
        super().__init__(self._without_lists(values))
        self.number = next(_numbers)
        self._validate = validate
        self._built_with = dict(values)
        ends = accumulate(hyper.count for hyper in hypers)
        self._slots = {h.name: end - h.count for h, end in zip(hypers, ends, strict=True)}
        self._may_be_tensors = [hyper.name for hyper in hypers if hyper.may_be_tensor]
        self._fixed = tuple(fixed)
        self._mirrors: dict[torch.device, torch.Tensor] = {}
        self._numbers()
        validate(self, self)

    def _numbers(self) -> list[float]:
        """Returns the initial numbers of a mirror, with 0 for tensors, which `on` copies."""
        found = [hyper.numbers(self[name]) or (0.0,) for name, hyper in self._hypers.items()]
        return list(chain.from_iterable(found))

    def on(self, device: torch.device) -> torch.Tensor:
        """Returns the mirror on a device: float64, one number per slot.

        Streams: each call copies hyperparameters that are tensors, on the current stream. The host
            does not wait.
        Capture: safe after the first call.

        Raises:
            CaptureError: a hyperparameter is a tensor on another device, which a graph would read
                only once.
        """
        mirror = self._mirrors.get(device)
        if mirror is None:
            mirror = self._mirrors[device] = torch.tensor(
                self._numbers(), dtype=torch.float64, device=device
            )
        for name, value in self._tensors():
            if value.device != device and is_capturing(device):
                raise CaptureError(
                    f"the optimizer's {name} is a tensor on {value.device}",
                    expected=f"a number, or a tensor on {device}",
                    got="a value that would be read only once, during the capture",
                    fix=f"group[{name!r}] = float(group[{name!r}])",
                )
            place = mirror[self._slots[name]]
            if value.device.type == "cpu":
                # The number is an argument of the launch; the host would wait for a copy.
                place.fill_(value.item())
            else:
                place.copy_(value.detach().reshape(()))
        return mirror

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Returns the hyperparameters that are tensors now, by name."""
        values = [(name, self[name]) for name in self._may_be_tensors]
        return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]

    def __setitem__(self, key: str, value: Any) -> None:
        """Assigns a value; see `update`."""
        self.update({key: value})

    def constants(self) -> Hashable:
        """Returns the host arguments of a launch, and the addresses of hyperparameters that are
        tensors.
        """
        tensors = [(name, value.data_ptr()) for name, value in self._tensors()]
        return (*map(self.get, self._fixed), *tensors)

    def check(self, values: Mapping[str, Any]) -> dict[str, Sequence[float] | None]:
        """Checks values that are about to be assigned together, without assigning them.

        Returns:
            The mirror's numbers of the hyperparameters among them; None for tensors.

        Raises:
            OptionError: a value is outside its range, or the combination is not allowed.
        """
        hypers = self._hypers.items()
        numbers = {key: hyper.numbers(values[key]) for key, hyper in hypers if key in values}
        self._validate(self._built_with, {**self, **values})
        return numbers

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assigns several keys together, and writes them to the mirrors on the current stream of
        each device.

        Raises:
            OptionError: a value is outside its range, or the combination is not allowed; nothing
                was changed.
            CaptureError: a graph is being captured, whose replays would not assign anew.
        """
        values = dict(*args, **kwargs)
        if any(map(is_capturing, self._mirrors)):
            raise CaptureError(
                f"the optimizer's {', '.join(values)} was assigned during a capture",
                expected="an assignment between replays, for the next one",
                got="an assignment that a replay would not make, or with the same value",
                fix="move scheduler.step() and assignments out of the captured function",
            )
        for key, numbers in self.check(values).items():
            for mirror in self._mirrors.values():
                for i, number in enumerate(numbers or ()):
                    mirror[self._slots[key] + i].fill_(number)
        super().update(self._without_lists(values))

    def _without_lists(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values, with tuples for lists of numbers: an assignment to an element, as in
        `group["betas"][0] = 0.5`, would not reach the mirrors, and so it raises.
        """
        lists = [name for name in self._hypers if isinstance(values.get(name), list)]
        return {**values, **{name: tuple(values[name]) for name in lists}}

    def __ior__(self, other: Any) -> OptimGroup:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles are plain dictionaries: the mirrors belong to one optimizer.
        return dict, (dict(self),)
