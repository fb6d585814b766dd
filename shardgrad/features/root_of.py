"""Finds the root context for calls outside of forward and backward."""

from __future__ import annotations

from torch import nn

from shardgrad.engine.lazy_init import lazy_init
from shardgrad.engine.unit import RootContext, unit_of
from shardgrad.errors import RootError


def root_of(model: nn.Module, call: str) -> RootContext:
    """Returns the context of a root. Before the root's first forward, this is a collective.

    Args:
        model: the root.
        call: the name of the calling function, such as "sleep", for the error message.

    Raises:
        RootError: `model` is not the root.
    """
    unit = unit_of(model) if isinstance(model, nn.Module) else None
    if unit is None or (unit.context is not None and not unit.is_root):
        raise RootError(
            f"{call}() must be called with the root",
            expected="the outermost module that fully_shard was called on",
            got=type(model).__name__,
            fix=f"shardgrad.{call}(root)",
        )
    return lazy_init(unit)
