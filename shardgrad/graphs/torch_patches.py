"""Functions of torch that are replaced for the length of a block.

Blocks may overlap, in several threads: a function is replaced when the first begins and restored
when the last ends. A replacement has to do what the original does for threads outside of any block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Patch", "Replacement"]

# Module, attribute, and what makes the replacement from the original.
Replacement = tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]


class Patch:
    """Replaces functions while at least one block is active."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a block may end where garbage is collected in another
        self._blocks = 0
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def active(self, replacements: Callable[[], Iterable[Replacement]]) -> Iterator[None]:
        """Replaces functions inside the block.

        Args:
            replacements: asked if no other block is active.
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
    """Assigns a function of a module; returns what undoes it, unless another library has replaced
    it in the meantime.
    """
    original = getattr(owner, name)
    setattr(owner, name, function)

    def undo() -> None:
        if getattr(owner, name) is function:
            setattr(owner, name, original)

    return undo
