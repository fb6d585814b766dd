"""The protocol between `graphed_step` and objects with state that a step uses.

A graph repeats the launches of the captured step. Python chose these from host state: which
parameters require a gradient, whether a gradient exists to accumulate into, whether a module is in
training mode. Each capturable object returns that state as *guards*, Dynamo's term for the
conditions under which compiled code is valid: a graph is replayed while they are equal, and another
graph is captured when they are not. A replay runs no Python, so each object also returns a
*snapshot*, a function that sets its host state to what the captured step left.

This file does not depend on the engine. `shardgrad.graphs.engine_state` has the adapters for
sharded models and for `shardgrad.optim`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial, singledispatch
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from shardgrad.errors import OptionError
from shardgrad.graphs.closed_over import NUMBERS, address_of
from shardgrad.graphs.outputs import host_value, plain_tensors

KEPT = (
    "gradients of an earlier call or backward, which the program keeps and a replay would "
    "overwrite. Clone them"
)


class CaptureAgain(Exception):
    """Raised in a capture that needs an eager call first, which prepares the state for the next
    capture.
    """


class Capturable:
    """State that a step uses. Subclass it for state that is neither in a module nor in an
    optimizer.

    Attributes:
        is_guarded: True if the guards cover everything that a snapshot restores. A replay then
            restores nothing if the captured step left the guards as they were.
    """

    is_guarded = False

    def begin_call(self) -> str | None:
        """Called at the beginning of every call, on the caller's stream, after earlier calls.

        If it returns a reason, earlier eager calls prepare no capture any more.
        """

    def at_eager_border(self) -> None:
        """Called at the end of an eager call, where a graph of the step would end. At its eager
        regions, `guards` is.
        """

    def guards(self) -> Hashable:
        """Returns the host state that may change and that decides what a step launches.

        Called at every step. Two steps with equal guards must launch the same work.
        """
        return None

    def quiesce(self) -> None:
        """Completes all work in flight. Called before a capture, inside it just before it ends, and
        after it.
        """

    def before_replays(self) -> Callable[[], bool] | None:
        """Called before a capture. Returns a function that is called before each replay of the
        graph and returns whether it may run; None if it always may.
        """
        return None

    def abort_capture(self) -> None:
        """Drops host state that a failed capture left. Called before snapshots are restored."""

    def after_eager_region(self) -> None:
        """Called inside a capture after an eager region. Must assume that the region wrote the
        parameters.
        """

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the present host state without touching device
        memory.
        """
        return nothing

    def known_to_graph(self) -> Any:
        """Called after a capture. Returns objects whose memory the graph uses and that may be
        replaced later.

        The graph holds references to them until it is destroyed.
        """
        return None

    def replayed(self) -> None:
        """Called after a replay, which may have written the memory that `tensors` yields."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) for all state on the device that persists from step to step. A
        tensor may be a DTensor or another wrapper subclass.
        """
        return iter(())


def nothing() -> None:
    """Does nothing: the snapshot of an object without host state."""


def host_snapshot(
    capturables: Sequence[Capturable],
    device: torch.device,
    generators: Sequence[torch.Generator],
) -> Callable[[], None]:
    """Returns a function that restores the present host state and random generators without
    touching other device memory.

    Args:
        capturables: the objects whose snapshots are taken.
        device: the device whose default generator is restored, besides the CPU's.
        generators: further generators to restore.
    """
    restores: list[Callable[[], object]] = [each.snapshot() for each in capturables]
    known = torch.default_generator, *generators
    restores += [partial(each.set_state, each.get_state()) for each in known]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        restores.append(partial(module.set_rng_state, module.get_rng_state(device), device))

    def restore() -> None:
        for each in restores:
            each()

    return restore


def difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """Describes the first difference between nested tuples as "old became new", at the innermost
    tuple that differs. The names of the (name, value) pairs that lead there come first.
    """
    for one, other in zip(before, now, strict=False):
        if one != other and isinstance(one, tuple) and isinstance(other, tuple):
            name = f"{now[0]} " if isinstance(now[0], str) else ""
            return name + difference(one, other)
    return f"{reprlib.repr(before)} became {reprlib.repr(now)}"


@singledispatch
def capturable(value: Any) -> Capturable:
    """Returns `value` as a `Capturable`; `capturable.register(cls, adapter)` adds an adapter.

    Raises:
        OptionError: no adapter is registered for its class.
    """
    raise OptionError(
        f"graphed_step does not support objects of type {type(value).__name__}",
        expected="modules, optimizers, generators, a shardgrad.graphs.Capturable, or a "
        "shardgrad.GradScaler; torch's GradScaler reads on the host whether to skip",
        got=repr(value),
        fix="graphed_step(model, optimizer)(function), with each model and optimizer an argument "
        "of its own, and the function in the second pair of parentheses; step schedulers between "
        "calls",
    )


class OptimizerState(Capturable):
    """Adapts an optimizer of torch or of another library. The numbers in its groups are guards,
    since a graph contains them as constants.

    The exception is the learning rate of torch's Adam and AdamW with `capturable=True`, which they
    read on the device. In a call, a device tensor stands for a number. The program gets its number
    back: schedules compute with it, and it may keep what it finds there.
    """

    is_guarded = True

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Learning rates, by the group's first parameter: loading replaces the groups themselves.
        self._rates: dict[int, torch.Tensor] = {}
        # Of the latest call: each group, the program's rate, and the tensor and its version.
        self._given: list[tuple[dict[str, Any], Any, torch.Tensor, int]] = []
        # The values in `_owners` at the last call of `guards`, and the plain tensors and numbers
        # among them, cached since guards are computed at every call.
        self._values: list[Any] = []
        self._memory: list[torch.Tensor] = []
        self._numbers: tuple[Any, ...] = ()

    def _owners(self) -> list[dict[Any, Any]]:
        """Returns the dictionaries that hold the optimizer's state."""
        state = self._optimizer.state
        owners = state, *state.values(), *self._optimizer.param_groups
        # What an optimizer keeps besides the entries of parameters may be anything.
        return [each for each in owners if isinstance(each, dict)]

    def begin_call(self) -> None:
        """See `Capturable`."""
        self.replayed()  # after a call that has raised
        self._given.clear()
        is_adam = isinstance(self._optimizer, torch.optim.Adam)  # or AdamW
        for group in self._optimizer.param_groups:
            if is_adam and group.get("capturable") and group["params"]:
                rate, first = group["lr"], group["params"][0]
                # A number from the program or a checkpoint, or a tensor on another device.
                if not isinstance(rate, torch.Tensor) or rate.device != first.device:
                    new = torch.empty((), device=first.device)
                    group["lr"] = own = self._rates.setdefault(id(first), new).fill_(rate)
                    self._given.append((group, rate, own, own._version))

    def replayed(self) -> None:
        """See `Capturable`. Gives the program its learning rates back, unless the step has written
        them.
        """
        for group, rate, own, version in self._given:
            if group["lr"] is own and own._version == version:
                group["lr"] = rate

    at_eager_border = replayed  # an eager call ends like a replay

    def guards(self) -> Hashable:
        """See `Capturable`."""
        groups, owners = self._optimizer.param_groups, self._owners()
        params = tuple([tuple(map(id, group["params"])) for group in groups])
        values = list(chain.from_iterable(map(dict.values, owners)))
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            self._values = values
            self._memory = list(plain_tensors(values))
            self._numbers = tuple(
                [pair for owner in owners for pair in owner.items() if type(pair[1]) in NUMBERS]
            )
        constants = tuple(
            [
                (key, _constant(value))
                for group in groups
                for key, value in group.items()
                if key != "params" and type(value) not in NUMBERS
            ]
        )
        addresses = *map(torch.Tensor.data_ptr, self._memory), *map(id, owners)
        return (
            self._numbers,
            constants,
            ("parameters", params),
            ("addresses of its state", addresses),
        )

    def snapshot(self) -> Callable[[], None]:
        """See `Capturable`."""
        contents = [(owner, dict(owner)) for owner in self._owners()]

        def restore() -> None:
            for owner, content in contents:
                owner.clear()  # of what the step has added
                owner.update(content)

        return restore

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Capturable`."""
        for number, owner in enumerate(self._owners()):
            for key, value in owner.items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} {number} of {type(self._optimizer).__name__}", value


def _constant(value: Any) -> Hashable:
    """Returns what a graph freezes of a hyperparameter that is not a number: of a tensor the
    address, and its value, too, if it is on the host.
    """
    if isinstance(value, list | tuple):
        return tuple(map(_constant, value))
    is_tensor = isinstance(value, torch.Tensor)
    return (address_of(value), host_value(value)) if is_tensor else repr(value)


capturable.register(Capturable, lambda value: value)
capturable.register(Optimizer, OptimizerState)
# Without guards: the generator is registered with the graph.
capturable.register(torch.Generator, lambda value: Capturable())
