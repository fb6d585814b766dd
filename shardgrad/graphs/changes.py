"""Describes the difference between two values of host state."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable

import torch

__all__ = ["difference"]


def difference(before: Hashable, now: Hashable) -> str:
    """Describes the first difference between nested tuples as "old became new", at the innermost
    tuple that differs. If that is the value of a (name, value) pair, the name comes first.
    """
    name = ""
    while isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        pairs = [(x, y) for x, y in zip(before, now, strict=True) if x != y]
        inner = [(x, y) for x, y in pairs if isinstance(x, tuple) and isinstance(y, tuple)]
        if not inner:
            break
        if isinstance(now[0], str):
            name = f"{now[0]} "
        before, now = inner[0]
    return f"{name}{_said(before)} became {_said(now)}"


def _said(value: Hashable) -> str:
    if isinstance(value, torch.Size):
        return "x".join(map(str, value)) or "a scalar"
    return reprlib.repr(value)
