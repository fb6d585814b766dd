"""Requests to stop: which signals are one, which are its echo, and what a second one does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest

from shardgrad.programs.train.failure import Interrupted
from shardgrad.programs.train.stop import ECHO_S, StopRequest


class EndedError(Exception):
    """The process would have ended."""


def started_by(process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SimpleNamespace(pid=process)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: launcher)


@pytest.mark.parametrize(
    ("apart_s", "ends"), [(0.0, False), (0.9 * ECHO_S, False), (1.1 * ECHO_S, True)]
)
def test_a_second_request_ends_the_process_unless_it_echoes_the_first(
    apart_s: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(status: int) -> None:
        assert status == Interrupted.exit_status
        raise EndedError

    moments = iter([5000.0, 5000.0 + apart_s])
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    stop = StopRequest()
    assert not stop.requested
    stop._on_signal(signal.SIGTERM, None)
    assert stop.requested
    if ends:
        with pytest.raises(EndedError):
            stop._on_signal(signal.SIGTERM, None)
    else:
        stop._on_signal(signal.SIGTERM, None)


def test_a_request_that_our_launcher_forwards_late_is_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter([5000.0, 5000.0 + 60 * ECHO_S])
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("the process would have ended"))
    started_by(os.getppid(), monkeypatch)
    stop = StopRequest()
    stop._on_signal(signal.SIGHUP, None)
    stop._on_signal(signal.SIGTERM, None)
    assert stop.requested


def test_the_end_of_the_launcher_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    started_by(os.getppid(), monkeypatch)
    assert not StopRequest().requested
    started_by(os.getppid() + 1, monkeypatch)
    assert StopRequest().requested
