"""Processes for tests: started by forking one that has imported torch, and waited for fairly.

`CONTEXT` is a `multiprocessing` context. What it starts has the environment of the first start.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.preloaded"])

# The least part of the time that counts, however busy the machine is.
_COUNTS_AT_LEAST = 1 / 8


def _queued_s(pid: int) -> dict[int, float]:
    """Returns for how long threads of a process, and of each below it, were ready and no core was
    free.
    """
    found, waiting = {}, [pid]
    while waiting:
        tasks = Path(f"/proc/{waiting.pop()}/task")
        with suppress(OSError):  # the process ended meanwhile
            for thread in os.listdir(tasks):
                with suppress(OSError, IndexError):  # the thread did, or this kernel does not count
                    found[int(thread)] = (
                        int((tasks / thread / "schedstat").read_text().split()[1]) / 1e9
                    )
                    waiting += map(int, (tasks / thread / "children").read_text().split())
    return found


class FairClock:
    """Seconds since it was made, without those in which a process was kept waiting for a core.

    A time limit by this clock ends what hangs, and does not end what is slow because the machine is
    busy.

    Args:
        pids: the processes that work, with those that they start; without any, this one.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = list(pids) or [os.getpid()]
        self._queued = self._read()
        self._began_s = time.monotonic()
        self._waited_s = 0.0

    def elapsed_s(self) -> float:
        """Returns the seconds that count."""
        queued, passed_s = self._read(), time.monotonic() - self._began_s
        # Of the whole time: the system counts a wait when it is over, which may be many calls
        # later.
        waits = (after - self._queued.get(thread, 0.0) for thread, after in queued.items())
        self._waited_s += max((0.0, *waits))
        self._queued |= queued
        return max(passed_s - self._waited_s, passed_s * _COUNTS_AT_LEAST)

    def _read(self) -> dict[int, float]:
        return {thread: queued for root in self._pids for thread, queued in _queued_s(root).items()}


def communicate(process: subprocess.Popen[str], timeout_s: float) -> tuple[str, str]:
    """Returns output and errors of a program, once it has ended.

    Args:
        process: with pipes.
        timeout_s: seconds, those left out in which it waited for a core.

    Raises:
        subprocess.TimeoutExpired: it has not ended.
    """
    clock = FairClock([process.pid])
    while True:
        try:
            return process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired:
            if clock.elapsed_s() > timeout_s:
                raise


def run(
    command: Sequence[str], *, timeout_s: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, as `subprocess.run` does with captured text; kills it if it takes
    longer.

    Args:
        command: words of the command line.
        timeout_s: as for `communicate`.
        options: of `subprocess.Popen`.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            output, errors = communicate(process, timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def orphaned_segments() -> set[str]:
    """Returns the names of torch's shared-memory segments whose process has ended."""
    made = {name: re.match(r"torch_(\d+)_", name) for name in os.listdir("/dev/shm")}
    return {
        name for name, by in made.items() if by is not None and not Path("/proc", by[1]).exists()
    }
