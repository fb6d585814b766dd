"""Reads the call stack of a thread of a rank that has stalled.

Frames are read by CPython, which holds the lock of its list of threads while it does. faulthandler
reads the list without this lock: if a C++ thread enters Python for the first time at that moment,
the process crashes, because CPython 3.11 lists a thread before it has a frame.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import NamedTuple

__all__ = ["Call", "calls_of", "calls_of_thread", "passes_collective", "program_call"]

_OURS = str(Path(__file__).parents[1]) + "/"
# Functions that decorators and `nn.Module.__call__` put around what the program has called.
_WRAPPERS = {
    *("wrapper", "inner", "inner_func", "_fn", "decorate_context", "_no_grad_wrapper"),
    *("_wrapped_call_impl", "__call__", "forward_failed"),
}


class Call(NamedTuple):
    """One call of a stack: where it is, in a function of this name."""

    filename: str
    line: int
    name: str


def calls_of_thread(thread: int) -> tuple[Call, ...]:
    """Returns the calls on the stack of the thread with this identifier, innermost first; none if
    it has ended. The local variables of a call that returns meanwhile stay alive until this
    function returns.
    """
    # Until 3.11.9, CPython may collect garbage while it holds the lock, and a finalizer that needs
    # the lock waits for ever (https://github.com/python/cpython/issues/106883).
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()
    return () if frame is None else _calls(walk_stack(frame))


def calls_of(error: BaseException) -> tuple[Call, ...]:
    """Returns the calls that an error went through, innermost first."""
    return _calls(walk_tb(error.__traceback__))[::-1]


def _calls(frames: Iterable[tuple[FrameType, int]]) -> tuple[Call, ...]:
    return tuple(
        Call(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames
    )


def program_call(calls: Iterable[Call]) -> str:
    """Returns the program's innermost line and what it calls: "full_tensor() at train.py:12".

    Args:
        calls: innermost first. Calls in torch, Python and shardgrad are not the program's.
    """
    called = ""
    for filename, number, name in calls:
        if not _is_library(filename):
            return f"{called + '()' if called else name} at {Path(filename).name}:{number}"
        name = "forward" if name == "_call_impl" else name
        called = called if name in _WRAPPERS else name
    return ""


def passes_collective(calls: Iterable[Call]) -> bool:
    """Returns whether calls, innermost first, are in a collective that the program has called."""
    collectives = (
        _torch_folder() + "distributed/",
        _OURS + "diagnosis/",
        _OURS + "engine/transports.py",
    )
    library = takewhile(_is_library, (call.filename for call in calls))
    return any(filename.startswith(collectives) for filename in library)


def _is_library(filename: str) -> bool:
    return filename.startswith((_torch_folder(), _OURS, "<"))


def _torch_folder() -> str:
    # Imported here, since programs that only read records do not import torch.
    return str(Path(getattr(sys.modules.get("torch"), "__file__", None) or "/torch/_").parent) + "/"
