"""Describes the difference between two values of host state."""

from __future__ import annotations

import reprlib
from typing import Any

__all__ = ["difference"]


def difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """Describes the first difference between nested tuples as "old became new", at the innermost
    tuple that differs. If that is the value of a (name, value) pair, the name comes first.
    """
    name = ""
    while len(before) == len(now):
        pairs = [(x, y) for x, y in zip(before, now, strict=True) if x != y]
        inner = [pair for pair in pairs if all(isinstance(each, tuple) for each in pair)]
        if not inner:
            break
        if isinstance(now[0], str):
            name = f"{now[0]} "
        before, now = inner[0]
    return f"{name}{reprlib.repr(before)} became {reprlib.repr(now)}"
