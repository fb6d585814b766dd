"""Replaces functions of torch for the duration of a block.

Blocks of several threads may overlap: a function is replaced when the first block begins and
restored when the last one ends. So a replacement must behave like the original in threads that are
outside of any block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Patch", "Replacement"]

# Module, attribute, and a function that returns the replacement for the original.
Replacement = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]


class Patch:
    """Replaces functions while at least one block is active."""

    def __init__(self) -> None:
        # Reentrant, since garbage collection in one block may run the finalizer that ends another.
        self._lock = threading.RLock()
        self._blocks = 0
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def active(self, replacements: Callable[[], Iterable[Replacement]]) -> Iterator[None]:
        """Replaces functions inside the block.

        Args:
            replacements: yields the replacements. Called if no other block is active.
        """
        with self._lock:
            if not self._blocks:
                for owner, name, make in replacements():
                    self._undo.append(_replace(owner, name, make(getattr(owner, name))))
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                while not self._blocks and self._undo:
                    self._undo.pop()()


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Assigns a function of a module. Returns a function that restores the original, unless another
    library has replaced it in the meantime.
    """
    original = getattr(owner, name)
    setattr(owner, name, function)

    def undo() -> None:
        if getattr(owner, name) is function:
            setattr(owner, name, original)

    return undo
