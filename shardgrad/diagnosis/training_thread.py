"""Where the training thread is: which line of the program called what, and for how long it has
stood still.

A thread that waits in a collective runs no Python and uses no CPU time, so its stack and its clock
tell, for torch's collectives as for ours. Nothing is patched, and a thread that is not looked at
pays nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.diagnosis.thread_stacks import Call, calls_of, thread_stacks

__all__ = ["TrainingThread", "call_in", "passes_collective"]

_OURS = str(Path(__file__).parents[1]) + "/"
# without a collective that was started, after which a line is taken to wait for the device
_DEVICE_S = 30.0
_BUSY = 0.2  # of a core; a thread that waits uses less
# Functions that decorators put in another's place.
_WRAPPERS = (
    "wrapper",
    "inner",
    "inner_func",
    "_fn",
    "decorate_context",
    "_no_grad_wrapper",
    "_wrapped_call_impl",
    "__call__",
)


class TrainingThread:
    """Looks at the thread that made it.

    Args:
        is_device_waited_for: collectives are ordered by streams: a thread waits for the device, on
            any line, and may use its core meanwhile.
    """

    def __init__(self, *, is_device_waited_for: bool = False) -> None:
        self._ident = threading.get_ident()
        self._is_device_waited_for = is_device_waited_for
        self._here: tuple[Call, ...] = ()
        self._since_s = self._cpu_s = 0.0

    def look(self) -> float:
        """Returns for how long the thread is known to have waited in one collective; 0 if it does
        not.

        To be called regularly, from another thread.
        """
        now_s = time.monotonic()
        calls = thread_stacks().get(self._ident, ())
        if not calls:
            return 0.0
        if _passes_collective(calls):
            if recorder.waits_in is None:
                return self._still_s(calls, now_s)
            self._here = ()
            return max(now_s - recorder.waits_since_s, 0.0)
        still_s = self._still_s(calls, now_s) if self._is_device_waited_for else 0.0
        return still_s if min(still_s, now_s - recorder.progress_s) > _DEVICE_S else 0.0

    def _still_s(self, here: tuple[Call, ...], now_s: float) -> float:
        """Returns for how long the thread has been in one place without using its core."""
        cpu_s = time.clock_gettime(time.pthread_getcpuclockid(self._ident))
        waited_s = now_s - self._since_s
        is_busy = cpu_s - self._cpu_s > _BUSY * waited_s and not self._is_device_waited_for
        if here != self._here or is_busy:
            self._here, self._cpu_s, self._since_s = here, cpu_s, now_s
            return 0.0
        return waited_s

    def call(self) -> str:
        """Returns what the program has called, and from where: "full_tensor() at train.py:12"."""
        return _call(thread_stacks().get(self._ident, ()))


def call_in(error: BaseException) -> str:
    """Returns the same of what an error went through."""
    return _call(calls_of(error))


def passes_collective(error: BaseException) -> bool:
    """Returns whether an error comes from a collective, torch's or ours."""
    return _passes_collective(calls_of(error))


def _call(calls: Iterable[Call]) -> str:
    """Returns the innermost line of the program among calls, innermost first, and what it
    called.
    """
    inside: list[str] = []
    for filename, number, name in calls:
        if not _is_library(filename):
            called = [each for each in reversed(inside) if each not in _WRAPPERS]
            return f"{called[0] + '()' if called else name} at {Path(filename).name}:{number}"
        is_module = name == "_call_impl"
        inside.append("forward" if is_module else name)
    return ""


def _torch_folder() -> str:
    torch = sys.modules.get("torch")
    return (
        str(Path(torch.__file__).parent) + "/"
        if torch is not None and torch.__file__
        else "/torch/"
    )


def _is_library(filename: str) -> bool:
    return filename.startswith((_torch_folder(), _OURS, "<"))


def _passes_collective(calls: Iterable[Call]) -> bool:
    """Returns whether calls, innermost first, pass a collective before they come to the
    program's.
    """
    collectives = (
        _torch_folder() + "distributed/",
        _OURS + "diagnosis/",
        _OURS + "engine/transports.py",
    )
    library = takewhile(_is_library, (call.filename for call in calls))
    return any(filename.startswith(collectives) for filename in library)
