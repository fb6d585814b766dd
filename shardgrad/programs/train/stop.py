"""Requests to stop a run: Ctrl-C, a scheduler's signal, or a launcher that has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import time
from types import FrameType

from shardgrad.programs.train.failure import Interrupted

# A terminal, torchrun and our launcher may each forward the same Ctrl-C.
ECHO_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_terminal(number: int) -> None:
    """After a terminal has hung up, write nowhere instead: each write to it would raise."""
    if number != signal.SIGHUP:
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask for a stop; not SIGHUP where it is ignored, as `nohup` has it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignored and number == signal.SIGHUP))


class StopRequest:
    """Records a request to stop this process; a second, later request ends the process at once.

    The end of the process that started this one is a request, too. If that is the launcher of
    `spawn`, it forwards the first request, seconds later on a loaded machine, and kills ranks on a
    second one, so they do not end themselves.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._launcher = multiprocessing.parent_process()
        # Which may have ended already, where it is the launcher.
        self._parent = os.getppid() if self._launcher is None else self._launcher.pid

    def install(self) -> StopRequest:
        """Installs the signal handlers; only the main thread may call this."""
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        return self

    @property
    def requested(self) -> bool:
        """Whether to finish the step, save, and exit."""
        return self._first_s is not None or os.getppid() != self._parent

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        leave_terminal(number)
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        elif now_s - self._first_s > ECHO_S and self._launcher is None:
            os._exit(Interrupted.exit_status)
