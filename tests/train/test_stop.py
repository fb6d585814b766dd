"""Requests to stop: which signals are one, which are its echo, and what a second one does."""

from __future__ import annotations

import os
import signal
import time

import pytest

from shardgrad.programs.train.failure import Interrupted
from shardgrad.programs.train.stop import ECHO_S, StopRequest


class EndedError(Exception):
    """The process would have ended."""


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
    stop = StopRequest()
    assert not stop.requested
    stop._on_signal(signal.SIGTERM, None)
    assert stop.requested
    if ends:
        with pytest.raises(EndedError):
            stop._on_signal(signal.SIGTERM, None)
    else:
        stop._on_signal(signal.SIGTERM, None)


def test_the_end_of_the_launcher_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    assert not stop.requested
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.requested


def test_a_rank_that_is_done_ends_with_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        assert status == 0
        raise EndedError

    handlers: dict[int, object] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(os, "_exit", end)
    stop = StopRequest()
    stop.finish()
    assert handlers[signal.SIGTERM] is signal.SIG_DFL
    stop._on_signal(signal.SIGTERM, None)  # in its last moments
    with pytest.raises(EndedError):
        stop.finish()


def test_a_rank_that_waits_for_another_is_ended_by_the_launcher_and_not_by_a_person() -> None:
    stop = StopRequest()
    stop._on_signal(signal.SIGINT, None)
    assert not stop.terminated_within(0.2)
    stop._on_signal(signal.SIGTERM, None)
    assert stop.terminated_within(60.0)
