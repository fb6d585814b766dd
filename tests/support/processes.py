"""Processes for tests: started by forking one that has imported torch, and waited for fairly.

`CONTEXT` is a `multiprocessing` context. What it starts has the environment of the first start.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Sequence
from pathlib import Path

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.preloaded"])

# The least part of the time that counts, however busy the machine is.
_COUNTS_AT_LEAST = 1 / 8


def _queued_s(pid: int) -> float:
    """Returns the seconds in which a thread of a process was ready to run and no core was free."""
    total_ns = 0
    for schedstat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total_ns += int(schedstat.read_text().split()[1])
        except (OSError, IndexError):  # it ended meanwhile, or this kernel does not count
            continue
    return total_ns / 1e9


class FairClock:
    """Seconds since it was made, without those in which a process was kept waiting for a core.

    A time limit by this clock ends what hangs, and does not end what is slow because the machine is busy.

    Args:
        pids: the processes that work; without any, this one.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._queued = {pid: _queued_s(pid) for pid in pids or [os.getpid()]}
        self._seen_s = time.monotonic()
        self._elapsed_s = 0.0

    def elapsed_s(self) -> float:
        """Returns the seconds that count."""
        now_s = time.monotonic()
        queued = {pid: _queued_s(pid) for pid in self._queued}
        waited_s = max(queued[pid] - before for pid, before in self._queued.items())
        passed_s, self._seen_s = now_s - self._seen_s, now_s
        self._queued = queued
        self._elapsed_s += max(passed_s - max(waited_s, 0.0), passed_s * _COUNTS_AT_LEAST)
        return self._elapsed_s
