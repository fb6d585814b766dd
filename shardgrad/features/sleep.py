"""Releasing a model's and an optimizer's memory for a while, and restoring it.

Everything is restored at its address, so views, captured graphs and other libraries' registrations
stay valid. This needs `offload_policy=SleepPolicy()`, which allocates shards, gradients and states
with `ops/virtual_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.engine.unit import RootContext, require_awake
from shardgrad.errors import OptionError
from shardgrad.features.root_of import root_of
from shardgrad.ops.virtual_memory import bring_back, give_back, is_virtual, require_virtual


class Sleeper(Protocol):
    """An optimizer of `shardgrad.optim`, or a `GraphPool`."""

    def offload(self) -> None:
        """Releases its memory."""

    def reload(self) -> None:
        """Restores its memory at the same addresses."""


# By context of a sleeping model: functions that allow reads again, and the tensors whose memory is
# released.
_asleep: WeakKeyDictionary[RootContext, tuple[list[Callable[[], Any]], list[torch.Tensor]]]
_asleep = WeakKeyDictionary()


def sleep(
    model: nn.Module,
    optimizer: Sleeper | None = None,
    pool: Sleeper | None = None,
    *,
    level: int = 1,
) -> None:
    """Releases memory until `wake`.

    Level 1 releases the optimizer's states: the model runs, and its weights can be sent. Level 2
    also releases shards, gradients and the memory of graphs; any use of them raises. Level 3 also
    drops the weights: after `wake`, they are zeros until they are loaded.

    For example, between two phases of training:

        shardgrad.sleep(model, optimizer, level=2)
        generate()
        shardgrad.wake(model, optimizer)

    Args:
        model: the root, of which every unit has `offload_policy=SleepPolicy()`.
        optimizer: an optimizer of `shardgrad.optim`; None to keep its states.
        pool: a `GraphPool` with `offload_policy=SleepPolicy()`; None to keep its memory.
        level: 1, 2 or 3.

    Streams: the host waits for the device. Capture: not safe.

    Raises:
        OptionError: the memory cannot be released, a gradient is not None, the level is invalid, or
            the optimizer cannot sleep.
        RootError: not the root.
        AsleepError: the model already sleeps.
    """
    context = root_of(model, "sleep")
    sleepers = _sleepers_in(pool, optimizer, level=level)
    require_awake(context.units)
    if level > 1 and context.forward_root is not None:
        raise OptionError(
            "sleep() would release the weights that a forward is using",
            expected="a call between forwards",
            got=f"a call in the forward of {type(context.forward_root.modules[0]).__name__}",
            fix="shardgrad.sleep(model, optimizer, level=2) after the forward",
        )
    shards = [group.shard for unit in context.units for group in unit.groups] if level > 1 else []
    gradients = [grads.shard for grads in context.grad_groups if grads.shard] if level > 1 else []
    require_virtual(shard for shard in shards if not shard.is_meta)
    context.join()  # a reduction in flight would bring its gradients into memory that is released
    if not all(gradient.are_absent() for gradient in gradients):
        raise OptionError(
            "sleep() would discard gradients",
            expected="no gradients",
            got="gradients that are not None",
            fix="optimizer.zero_grad() before shardgrad.sleep(model, optimizer, level=2)",
        )
    with ExitStack() as undo:  # a refusal changes nothing, a failure loses nothing
        for sleeper in sleepers:
            if sleeper is optimizer or level > 1:
                sleeper.offload()
                undo.callback(sleeper.reload)
        if level > 1:
            context.quiesce()
            # The program may still hold a gradient whose parameter has none.
            kept = [gradient.flat for gradient in gradients if gradient.kept_places()]
            lost = [gradient.flat for gradient in gradients if not gradient.kept_places()]
            (kept if level == 2 else lost).extend(shards)
            kept, lost = list(filter(is_virtual, kept)), list(filter(is_virtual, lost))
            give_back(kept)  # a failure to save releases nothing
            give_back(lost, keep=False)
            _asleep[context] = _refuse_reads(context), lost + kept
        undo.pop_all()


def wake(model: nn.Module, optimizer: Sleeper | None = None, pool: Sleeper | None = None) -> None:
    """Allocates the memory that `sleep` has released again, at the same addresses, and restores its
    content. If there is not enough memory, it may be called again.

    For example:

        shardgrad.wake(model, optimizer)

    Args:
        model: as for `sleep`.
        optimizer: as for `sleep`.
        pool: as for `sleep`.

    Streams: copies on the current stream. Capture: not safe.

    Raises:
        OptionError: the optimizer cannot sleep.
        RootError: not the root.
    """
    context, sleepers = root_of(model, "wake"), _sleepers_in(optimizer, pool)
    undo, memory = _asleep.get(context, ([], []))
    bring_back(memory)  # if this fails, the model still sleeps
    while undo:
        undo.pop()()
    for sleeper in sleepers:
        sleeper.reload()


def _sleepers_in(*given: Sleeper | None, level: int = 1) -> list[Sleeper]:
    """Returns the optimizer and the pool, as far as they are given."""
    sleepers = [each for each in given if each is not None]
    if level not in (1, 2, 3) or not all(hasattr(each, "reload") for each in sleepers):
        raise OptionError(
            "sleep() or wake() got an invalid level, optimizer or pool",
            expected="level=1, 2 or 3, an optimizer from shardgrad.optim, and a GraphPool, or None",
            got=f"level={level!r}, {sleepers}",
            fix="shardgrad.sleep(model, optimizer, level=1)",
        )
    return sleepers


def _refuse_reads(context: RootContext) -> list[Callable[[], Any]]:
    """Makes forwards, state dicts, `module.to()` and reads of a weight raise: a state dict would
    save zeros, or load values that `wake` overwrites. Returns functions that undo this.
    """

    def refuse(*_: Any, **__: Any) -> None:
        require_awake(context.units)

    undo: list[Callable[[], Any]] = []
    for unit in context.units:
        unit.is_asleep = True
        undo.append(partial(setattr, unit, "is_asleep", False))
    roots = nn.ModuleList(context.root.modules)  # one, or those of a list
    for module in roots.modules():
        undo.append(module.register_state_dict_pre_hook(refuse).remove)
        undo.append(module.register_load_state_dict_pre_hook(refuse).remove)
        module.__dict__["_apply"] = refuse
        undo.append(partial(module.__dict__.pop, "_apply"))
    for param in roots.parameters():
        if isinstance(param, DTensor):
            for method in ("full_tensor", "to_local", "redistribute"):
                setattr(param, method, refuse)
                undo.append(partial(delattr, param, method))
    return undo
