"""The protocol between `graphed_step` and whatever has state that a step uses.

A graph repeats what a step launched. Python decided what that was, from state of the host: which
parameters require a gradient, whether a gradient is there to be added to, whether a module is in
training mode. Each capturable object returns that state as *guards*, as Dynamo calls the conditions
under which compiled code is valid: a graph is replayed while they are equal, and another graph is
captured when they are not. A replay runs no Python, so each object also returns a *snapshot*, a
function that puts its host state back to where the captured step left it.

Nothing here knows the engine. `shardgrad.graphs.engine_state` has the adapters for sharded models
and for `shardgrad.optim`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import singledispatch
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from shardgrad.errors import OptionError
from shardgrad.graphs.outputs import host_value, plain_tensors

__all__ = [
    "Capturable",
    "CaptureAgain",
    "OptimizerState",
    "adapt",
    "capturable",
    "nothing",
]

_NUMBERS = (bool, int, float, str, type(None))


class CaptureAgain(Exception):
    """Raised in a capture by state that an eager call makes ready for the next one."""


class Capturable:
    """State that a step uses. Subclass it for state that is neither in a module nor in an
    optimizer.

    Attributes:
        is_guarded: True if all that a snapshot restores is among the guards, so that a replay that
            leaves equal guards restores nothing.
    """

    is_guarded = False

    def begin_call(self) -> None:
        """Called first in every call, on the program's stream, after earlier calls."""

    def at_eager_border(self) -> None:
        """Called in an eager call where a graph of it would end: at its end, and at eager
        regions.
        """

    def guards(self) -> Hashable:
        """Returns the host state that may change and that decides what a step launches.

        Called at every step. Two steps with equal guards launch the same work.
        """
        return None

    def quiesce(self) -> None:
        """Completes all work in flight. Called before a capture, at its end inside it, and after
        it.
        """

    def before_replays(self) -> Callable[[], bool] | None:
        """Called before a capture. Returns a function that is called before each of its replays,
        and returns False if there must be none; None if there always may.
        """
        return None

    def abort_capture(self) -> None:
        """Drops what a failed capture left on the host. Called before snapshots are restored."""

    def after_eager_region(self) -> None:
        """Assumes that code outside of the graph wrote parameters. Called inside a capture, after a
        split.
        """

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the present host state. It does not touch device
        memory.
        """
        return nothing

    def known_to_graph(self) -> Any:
        """Returns objects whose memory a capture has just met and that may be replaced while its
        graph lives.

        They are kept until the graph is destroyed.
        """
        return None

    def replayed(self) -> None:
        """Called after a replay, which has changed the memory that `tensors` yields."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) for the memory in which state lives from step to step; a tensor
        may be a DTensor or another wrapper subclass.
        """
        return iter(())

    def reports(self) -> dict[str, torch.Tensor]:
        """Returns device scalars for a progress display, by name."""
        return {}


def nothing() -> None:
    """Restores nothing."""


def capturable(value: Any) -> Capturable:
    """Returns `value` as a `Capturable`.

    Raises:
        OptionError: `adapt` knows no adapter for its class.
    """
    return value if isinstance(value, Capturable) else adapt(value)


@singledispatch
def adapt(value: Any) -> Capturable:
    """Returns the adapter of an object; `adapt.register(cls, adapter)` adds one for a class.

    Raises:
        OptionError: there is none.
    """
    raise OptionError(
        f"graphed_step was given a {type(value).__name__}",
        expected="modules, optimizers, shardgrad.GradScaler, generators, or a "
        "shardgrad.graphs.Capturable",
        got=_hint(value),
        fix="graphed_step(model, optimizer)(function)",
    )


def _hint(value: Any) -> str:
    if isinstance(value, torch.amp.GradScaler):
        return (
            "torch's GradScaler, which reads on the host whether to skip; shardgrad.GradScaler "
            "does not"
        )
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return "a schedule; step it between calls, outside of the graph"
    if callable(value):
        return "a function, which goes into the second pair of parentheses"
    return repr(value)


class OptimizerState(Capturable):
    """An optimizer of torch or of another library. Numbers in its groups are constants of a graph:
    guards.

    A learning rate of torch's Adam and AdamW with `capturable=True` is none: they read it on the
    device, so a number is written into a tensor there, which schedules fill in place.
    """

    is_guarded = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rates: dict[int, torch.Tensor] = {}  # by the number of the group
        # What the state held at the last look, and the memory of its tensors.
        self._values: list[Any] = []
        self._memory: list[torch.Tensor] = []

    def begin_call(self) -> None:
        """See `Capturable`."""
        if not isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW):
            return
        for number, group in enumerate(self._optimizer.param_groups):
            rate, device = group["lr"], _device(group)
            if not group.get("capturable") or device is None or rate is self._rates.get(number):
                continue
            # A number, of the program's or a checkpoint's; a tensor may be elsewhere than needed.
            if not isinstance(rate, torch.Tensor) or rate.device != device:
                tensor = self._rates.setdefault(number, torch.empty((), device=device))
                group["lr"] = tensor.fill_(rate)

    def guards(self) -> Hashable:
        """See `Capturable`."""
        groups = self._optimizer.param_groups
        params = tuple([tuple(map(id, group["params"])) for group in groups])
        numbers = tuple(
            [
                (key, value if type(value) in _NUMBERS else _constant(value, device))
                for group, device in zip(groups, map(_device, groups), strict=True)
                for key, value in group.items()
                if key != "params"
            ]
        )
        values = list(chain.from_iterable(map(dict.values, self._optimizer.state.values())))
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            self._values = values
            self._memory = list(plain_tensors(values))
        addresses = tuple(map(torch.Tensor.data_ptr, self._memory))
        return numbers, ("parameters", params), ("addresses of its state", addresses)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Capturable`."""
        for number, state in enumerate(self._optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    name = f"{key} of parameter {number} of {type(self._optimizer).__name__}"
                    yield name, value
        for number, rate in self._rates.items():
            yield f"learning rate of group {number} of {type(self._optimizer).__name__}", rate


def _device(group: dict[str, Any]) -> torch.device | None:
    return group["params"][0].device if group["params"] else None


def _constant(value: Any, device: torch.device | None) -> Hashable:
    """Returns what a graph keeps of a hyperparameter that is no number: where a tensor is, and what
    it holds if it is not where the parameters are.
    """
    if isinstance(value, list | tuple):
        return tuple([_constant(each, device) for each in value])
    if not isinstance(value, torch.Tensor):
        return repr(value)
    is_read = value.device == device
    addresses = tuple(map(torch.Tensor.data_ptr, plain_tensors([value])))
    return addresses, b"" if is_read else host_value(value)


@adapt.register
def _generator(value: torch.Generator) -> Capturable:
    return Capturable()  # the graph registers it


adapt.register(Optimizer, OptimizerState)
