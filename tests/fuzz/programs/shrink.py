"""Makes a program that fails small: fewer operations, a smaller model, options as by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from tests.fuzz.programs.contract import is_valid
from tests.fuzz.programs.program import Program


def shrunk(program: Program, fails: Callable[[Program], bool], *, tries: int = 400) -> Program:
    """Returns a smaller program that still fails.

    Args:
        program: one that does.
        fails: runs a program; True if it fails in the same way.
        tries: calls of `fails` at most.
    """
    smaller = (each for each in _smaller(program) if is_valid(each))
    for candidate in smaller:
        if not tries:
            break
        tries -= 1
        if fails(candidate):
            return shrunk(candidate, fails, tries=tries)
    return program


def _smaller(value: Any) -> Iterator[Any]:
    """Yields copies that are a bit smaller, those that are most so first; `seed` stays."""
    parts = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "seed"}
    # Operations first, and the order of blocks before the blocks.
    for field in reversed(fields(value)):
        now = parts.get(field.name)
        for part in _shorter(now) if isinstance(now, tuple) else (field.default,):
            if field.name in parts and part not in (now, MISSING):
                yield replace(value, **{field.name: part})
    for name, now in parts.items():
        if is_dataclass(now):
            yield from (replace(value, **{name: part}) for part in _smaller(now))
        for place, item in enumerate(now) if isinstance(now, tuple) else ():
            for part in _smaller(item) if is_dataclass(item) else ():
                yield replace(value, **{name: (*now[:place], part, *now[place + 1 :])})


def _shorter(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    size = len(items)
    while size:
        for begin in range(0, len(items), size):
            yield items[:begin] + items[begin + size :]
        size //= 2
