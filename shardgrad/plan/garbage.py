"""When Python looks for garbage while a plan is made. Imports nothing of torch, whose import
profits too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Runs without the collector, and at the end collects the garbage that was made inside.

    A collection in between looks at every object of torch as well, which takes a sixth of a plan's
    time. At the end it looks only at what is new since the last one: the model and its tensors,
    which refer to each other.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if was_enabled:
            gc.enable()
