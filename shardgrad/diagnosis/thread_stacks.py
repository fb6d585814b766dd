"""The stacks of all threads as text: to look at a thread changes nothing about it.

`sys._current_frames()` creates frame objects, which is wrong here for two reasons. A frame that a
thread refers to outlives its call and keeps its local variables alive, so gradients would seem to
be kept by the program ([Note: Kept gradients] in `grad_shard.py`). And CPython 3.11 before
3.11.9 may collect garbage while it holds the lock of its list of threads, where a finalizer that
needs this lock waits for ever (https://github.com/python/cpython/issues/106883). faulthandler reads
the frames and creates no object. It reads the list of threads without the list's lock, though:
a C++ thread that enters Python for the first time at that very instant ends the process, because
CPython 3.11 lists a thread before it has a frame. A thread that looked without a pause at a rank
that trains has shown this. So looks are rare: at a rank that stands still, and once when the last
sharded model is gone.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

__all__ = ["LIMIT", "Call", "calls_of", "passes_collective", "program_call", "thread_stacks"]

LIMIT = 100  # of faulthandler: threads, the newest first, and calls of each, the innermost first

_HEADING = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)')
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


def thread_stacks() -> dict[int, tuple[Call, ...]]:
    """Returns the stack of each thread, innermost call first, by the thread's identifier; see
    `LIMIT`.
    """
    file = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(file, all_threads=True)
        # Characters beyond ASCII are escaped as in Python.
        text = os.pread(file, os.fstat(file).st_size, 0).decode("unicode_escape", "replace")
    finally:
        os.close(file)
    stacks: dict[int, list[Call]] = {}
    calls: list[Call] = []
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            calls = stacks.setdefault(int(heading[1], 16), [])
        elif call := _CALL.fullmatch(line):
            filename, number, name = call.groups()
            calls.append(Call(filename, int(number) if number.isdigit() else 0, name))
    return {thread: tuple(calls) for thread, calls in stacks.items()}


def calls_of(error: BaseException) -> tuple[Call, ...]:
    """Returns the calls that an error went through, innermost first."""
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    return tuple(Call(code.co_filename, line, code.co_name) for code, line in reversed(frames))


def program_call(calls: Iterable[Call]) -> str:
    """Returns the program's innermost line and what it calls: "full_tensor() at train.py:12".

    Args:
        calls: innermost first; torch's, Python's and ours are not the program's.
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
    # Programs that only read what ranks recorded import no torch.
    return str(Path(getattr(sys.modules.get("torch"), "__file__", None) or "/torch/_").parent) + "/"
