"""Refusing computation with sharded parameters outside of their unit's forward.

torch raises when a DTensor meets a plain tensor, but its message names neither the module nor a
fix. So there is a check before the forward of every module whose sharded parameters belong to a
unit around it. A method that reads a sharded parameter itself meets torch's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.param_group import ParamGroup, ParamState
from shardgrad.errors import UnitBypassedError

__all__ = ["guard_owner"]


def guard_owner(module: nn.Module, group: Callable[[], ParamGroup | None]) -> None:
    """Refuses a call of `module` while `group`, which owns its parameters, is sharded."""

    def check(called: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        owner = group()
        if owner is not None and owner.state is not ParamState.UNSHARDED:
            names = [p.name for p in owner.params if len(p.owners) > 1 and called in dict(p.owners)]
            raise _bypassed(called, owner.name, names[:1])

    # Before the hook of the module's own unit, if it has one: nothing is gathered for a call that
    # is refused.
    module.register_forward_pre_hook(check, prepend=True)


def _bypassed(module: nn.Module, unit_name: str, tied: Sequence[str]) -> UnitBypassedError:
    """Builds the error; `tied` names a parameter that `module` shares with others, so that a common
    ancestor owns it.
    """
    kind, owner = type(module).__name__.removeprefix("FSDP"), unit_name or "root"
    if tied:
        how = f"{kind} was called outside of unit {owner!r}, which owns its tied {tied[0]}"
        fix = f"call the unit that owns it, {unit_name or 'the root'}"
    else:
        how = f"{kind}, an inner module of unit {owner!r}, was called directly"
        fix = (
            "call the unit itself, or make this module a unit as well: "
            "shardgrad.fully_shard(module)"
        )
    error = UnitBypassedError(
        f"{how}, while its parameters are sharded: got mixed torch.Tensor and DTensor",
        expected="parameters used inside their unit's forward, or in a registered method",
        got="a computation on this rank's shards, whose gradients would not be averaged",
        where=f"rank {dist.get_rank() if dist.is_initialized() else 0}, unit {owner!r}",
        fix=f"{fix}. For a call in a method of the model: "
        'shardgrad.register_fsdp_forward_method(model, "method")',
    )
    recorder.report(error)  # other ranks may not have made the mistake, and wait
    return error
