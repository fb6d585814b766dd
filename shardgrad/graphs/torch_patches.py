"""Replaces functions of torch, each once and until the process ends.

A replacement must behave like the original wherever no graphed step is concerned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["replace"]

_lock = threading.Lock()
_replaced: set[tuple[Any, str]] = set()


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Assigns `make` of the original to a function of a module, in the first call for it."""
    with _lock:
        if (owner, name) not in _replaced:
            _replaced.add((owner, name))
            setattr(owner, name, make(getattr(owner, name)))
