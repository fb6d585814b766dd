"""Reads the call stack of a thread of a rank that has stalled.

Frames are read by CPython, which holds the lock of its list of threads while it does. faulthandler
reads the list without this lock: if a C++ thread enters Python for the first time at that moment,
the process crashes, because CPython 3.11 lists a thread before it has a frame.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary, StackSummary, walk_stack

import torch

_OURS = str(Path(__file__).parents[1]) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_COLLECTIVES = (_TORCH + "distributed/", _OURS + "diagnosis/", _OURS + "engine/transports.py")
# Functions that decorators and `nn.Module.__call__` put around what the program has called.
_WRAPPERS = {
    *("wrapper", "inner", "inner_func", "_fn", "decorate_context", "_no_grad_wrapper"),
    *("_wrapped_call_impl", "__call__", "forward_failed"),
}


def calls_of_thread(thread: int) -> Sequence[FrameSummary]:
    """Returns the calls of the thread with this identifier, innermost first; none if it has ended.
    The local variables of a call that returns meanwhile stay alive until this function returns.
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
    return () if frame is None else StackSummary.extract(walk_stack(frame), lookup_lines=False)


def program_call(calls: Iterable[FrameSummary]) -> str:
    """Returns the program's innermost line and what it calls: "full_tensor() at train.py:12".

    Args:
        calls: innermost first. Calls in torch and shardgrad are not the program's, nor are those
            in no file. Those in Python's library are: `contextlib`, if it calls a collective.
    """
    called = ""
    for call in calls:
        if not _is_library(call.filename):
            what = f"{called}()" if called else call.name
            return f"{what} at {Path(call.filename).name}:{call.lineno}"
        name = "forward" if call.name == "_call_impl" else call.name
        called = called if name in _WRAPPERS else name
    return ""


def passes_collective(calls: Iterable[FrameSummary]) -> bool:
    """Returns whether calls, innermost first, are in a collective that the program has called."""
    library = takewhile(_is_library, (call.filename for call in calls))
    return any(filename.startswith(_COLLECTIVES) for filename in library)


def _is_library(filename: str) -> bool:
    return filename.startswith((_TORCH, _OURS, "<"))
