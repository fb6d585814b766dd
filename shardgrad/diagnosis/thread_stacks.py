"""The stacks of all threads as text: to look at a thread changes nothing about it.

`sys._current_frames()` creates frame objects, which is wrong here for two reasons. A frame that a
thread refers to outlives its call and keeps its local variables alive, so gradients would seem to
be kept by the program ([Note: Kept gradients] in `gradient_objects.py`). And CPython 3.11 before
3.11.9 may collect garbage while it holds the lock of its list of threads, where a finalizer that
needs this lock waits for ever (https://github.com/python/cpython/issues/106883). faulthandler reads
the frames and creates no object.
"""

from __future__ import annotations

import faulthandler
import os
import re
from traceback import walk_tb
from typing import NamedTuple

__all__ = ["LIMIT", "Call", "calls_of", "thread_stacks"]

LIMIT = 100  # of faulthandler: threads, the newest first, and calls of each, the innermost first

_HEADING = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)')
_ESCAPED = re.compile(r"\\(?:x(..)|u(.{4})|U(.{8}))")


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
        text = os.pread(file, os.fstat(file).st_size, 0).decode("ascii", "replace")
    finally:
        os.close(file)
    stacks: dict[int, list[Call]] = {}
    calls: list[Call] = []
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            calls = stacks.setdefault(int(heading[1], 16), [])
        elif call := _CALL.fullmatch(line):
            filename, number, name = call.groups()
            calls.append(
                Call(_unescaped(filename), int(number) if number.isdigit() else 0, _unescaped(name))
            )
    return {thread: tuple(calls) for thread, calls in stacks.items()}


def calls_of(error: BaseException) -> tuple[Call, ...]:
    """Returns the calls that an error went through, innermost first."""
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    return tuple(Call(code.co_filename, line, code.co_name) for code, line in reversed(frames))


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[found.lastindex or 0], 16)), text)
