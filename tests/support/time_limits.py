"""Time limits of tests, for `pytest-timeout`: what a busy machine takes away is not counted."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import pytest
import pytest_timeout

from tests.support.processes import FairClock


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """Leaves out of a test's limit the time in which its processes wait for a core."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    clock = FairClock()

    def ring(number: int, frame: FrameType | None) -> None:
        left_s = settings.timeout - clock.elapsed_s()
        if left_s <= 0:
            pytest_timeout.timeout_sigalrm(item, settings)
        signal.setitimer(signal.ITIMER_REAL, max(left_s, 1.0))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True
