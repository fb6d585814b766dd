"""The frames of all threads, without a collection of garbage while the interpreter lists them.

CPython 3.11 before 3.11.9 makes frame objects with the lock of its list of threads held, and a collection may
begin there (https://github.com/python/cpython/issues/106883). That calls finalizers and callbacks of weak
references, in any of which `sys._current_frames()`, or the start or the end of a thread, waits for this lock
for ever. The whole process waits with it, since the interpreter is not let go meanwhile.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from operator import call
from types import FrameType
from typing import Any, cast

__all__ = ["current_frames"]


def current_frames() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread, by the thread's identifier."""
    never, as_before = partial(gc.set_threshold, 0), partial(gc.set_threshold, *gc.get_threshold())
    steps: tuple[Callable[[], Any], ...] = (never, sys._current_frames, as_before)
    # One instruction of the interpreter: no other thread runs in between and finds collections turned off.
    _, frames, _ = map(call, steps)
    return cast(dict[int, FrameType], frames)
