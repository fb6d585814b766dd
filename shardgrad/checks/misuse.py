"""Refusing computation with sharded parameters outside of their unit's forward.

torch raises when a DTensor meets a plain tensor, but its message names neither the module nor a
fix. So there is a check before the forward of every module whose sharded parameters belong to a
unit around it, and torch's error is translated in the methods of units.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.param_group import ParamGroup, ParamState
from shardgrad.engine.unit import unit_of
from shardgrad.errors import UnitBypassedError

__all__ = ["MIXED_TENSORS", "guard_owner", "guarded_methods"]

# In torch's own error.
MIXED_TENSORS = "got mixed torch.Tensor and DTensor"


def guard_owner(module: nn.Module, group: Callable[[], ParamGroup | None]) -> None:
    """Refuses a call of `module` while `group`, which owns its parameters, is sharded."""

    def check(called: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        owner = group()
        if owner is not None and owner.state is not ParamState.UNSHARDED:
            names = [p.name for p in owner.params if len(p.owners) > 1 and called in dict(p.owners)]
            raise _bypassed(called, owner.name, tied=names[:1])

    # Before the hook of the module's own unit, if it has one: nothing is gathered for a call that
    # is refused.
    module.register_forward_pre_hook(check, prepend=True)


def guarded_methods(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Returns the methods of a module class, wrapped to explain torch's error about mixed tensors.

    Only methods that a program defines itself: not dunder methods, and not `forward` or anything
    else that `nn.Module` has, since hooks surround those.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)]):
        for name, attribute in vars(base).items():
            is_method = isinstance(attribute, types.FunctionType) and not hasattr(nn.Module, name)
            if is_method and not name.startswith("__"):
                methods[name] = _explaining(attribute)
            else:
                methods.pop(name, None)
    return methods


def _explaining(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            unit = unit_of(self)
            if MIXED_TENSORS not in str(error) or unit is None or unit.is_unsharded:
                raise
            raise _bypassed(self, unit.name, method.__name__) from error

    return call


def _bypassed(
    module: nn.Module, unit_name: str, method: str | None = None, *, tied: Sequence[str] = ()
) -> UnitBypassedError:
    """Builds the error, naming the method of the innermost unit on the call stack that led here.

    `tied` names a parameter that `module` shares with others, so that a common ancestor owns it.
    """
    kind = type(module).__name__.removeprefix("FSDP")
    caller = method or _method_on_stack()
    if caller is None and tied:
        how = (
            f"{kind} was called outside of unit {unit_name or 'root'!r}, which owns its tied "
            f"{tied[0]}"
        )
        fix = (
            f"call the unit that owns it, {unit_name or 'the root'}, or do this in a method of it: "
            'shardgrad.register_fsdp_forward_method(model, "method")'
        )
    elif caller is None:
        how = f"{kind}, an inner module of unit {unit_name or 'root'!r}, was called directly"
        fix = (
            "call the unit itself, or make this module a unit as well: "
            "shardgrad.fully_shard(module)"
        )
    else:
        how = (
            f"{kind} of unit {unit_name or 'root'!r} was used by its method {caller}(), which is "
            "not forward"
        )
        fix = f'shardgrad.register_fsdp_forward_method(model, "{caller}")'
    error = UnitBypassedError(
        f"{how}, while its parameters are sharded: got mixed torch.Tensor and DTensor",
        expected="parameters used inside their unit's forward, or in a registered method",
        got="a computation on this rank's shards, whose gradients would not be averaged",
        where=f"rank {dist.get_rank() if dist.is_initialized() else 0}, unit "
        f"{unit_name or 'root'!r}",
        fix=fix,
    )
    recorder.report(error)  # other ranks may not have made the mistake, and wait
    return error


def _method_on_stack() -> str | None:
    """Returns the innermost method of a sharded module that is running, other than forward."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        receiver = frame.f_locals.get("self")
        name = frame.f_code.co_name
        if (
            isinstance(receiver, nn.Module)
            and unit_of(receiver) is not None
            and hasattr(receiver, name)
        ):
            return name if name in guarded_methods(type(receiver).__mro__[2]) else None
        frame = frame.f_back
    return None
