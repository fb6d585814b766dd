"""Requests to stop a run: Ctrl-C, SIGTERM of a scheduler, or a launcher that has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType

from shardgrad.programs.train.failure import Interrupted

# A terminal and the launcher may each forward the same request.
ECHO_S = 1.0
_STOPPING = b"shardgrad train: Stopping after this step; Ctrl-C again stops at once.\n"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Records a request to stop this process; a second, later request ends the process at once.

    The end of the process that started this one is a request, too.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._is_terminated = False
        self._parent = os.getppid()

    def install(self) -> StopRequest:
        """Installs the signal handlers; only the main thread may call this."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # the launcher held them back
        return self

    def close(self) -> None:
        """Ignores further requests, as nothing is left to be stopped."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def finish(self) -> None:
        """Ends this process if its launcher was terminated or has ended, or is from now on: it does
        not take what this process returns, which would wait for that.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._is_terminated or os.getppid() != self._parent:
            os._exit(0)

    @property
    def requested(self) -> bool:
        """Whether to finish the step, save, and exit."""
        return self._first_s is not None or os.getppid() != self._parent

    def terminated_within(self, seconds: float) -> bool:
        """Returns whether the launcher has asked this process to end, or does so in time."""
        end_s = time.monotonic() + seconds
        while not self._is_terminated and time.monotonic() < end_s:
            time.sleep(0.1)
        return self._is_terminated

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        self._is_terminated |= number == signal.SIGTERM
        if self._first_s is None:
            self._first_s = now_s
            if number == signal.SIGINT and os.environ.get("RANK") == "0":
                with contextlib.suppress(OSError):  # nobody may be left who would read it
                    # Not print: the signal may have interrupted one.
                    os.write(2, _STOPPING)
        elif now_s - self._first_s > ECHO_S:
            os._exit(Interrupted.exit_status)
