"""Requests to stop a run: Ctrl-C, a scheduler's signal, or a launcher that has ended."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from shardgrad.train.failure import Interrupted

# A terminal, torchrun and our launcher may each forward the same Ctrl-C.
ECHO_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Records a request to stop this process; a second, later request ends the process at once."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._parent = os.getppid()

    def install(self) -> StopRequest:
        """Installs the signal handlers; only the main thread may call this."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        return self

    @property
    def requested(self) -> bool:
        """Whether to finish the step, save, and exit."""
        return self._first_s is not None or os.getppid() != self._parent

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        elif now_s - self._first_s > ECHO_S:
            os._exit(Interrupted.exit_status)
