"""The fault injector: waits inside a rank for a place in the program and runs an action there.

`python -m tests.drills.injector PLAN TRACE WORDS` is `shardgrad WORDS` with the fault of a plan.
The training program has no code for that: functions are wrapped in the process that the ranks are
forked from, and file operations are observed through Python's audit events.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardgrad.diagnosis.flight_recorder import FlightRecorder, GroupLog, recorder
from shardgrad.programs.cli import main
from shardgrad.programs.train.corpus import Sampler
from tests.drills.faults import CATALOGUE, FILE_EVENTS, Plan, is_of_checkpoints


class FaultInjector:
    """Runs the action of a plan once, at its place.

    Args:
        plan: the fault to inject.
        trace: file to write `time.monotonic()` into, before the action; all processes of a machine
            share that clock.
    """

    def __init__(self, plan: Plan, trace: Path) -> None:
        self._plan = plan
        self._trace = trace
        self._count = 0
        self._is_done = False

    def comes(self, part: str, *, begins: bool = False) -> None:
        """Called when a phase begins, and before a collective is launched or a file is touched."""
        here = os.environ.get("RANK"), recorder.step, part
        if self._is_done or here != (str(self._plan.rank), self._plan.step, self._plan.part):
            return
        self._count = 0 if begins else self._count + 1
        if self._count == self._plan.number:
            self._is_done = True
            fresh = self._trace.with_suffix(".new")
            fresh.write_text(str(time.monotonic()))
            fresh.replace(self._trace)  # nobody sees a part of it
            CATALOGUE[self._plan.fault].action()


def arm(plan: Plan, trace: Path) -> None:
    """Installs the injector in this process and in all that are forked from it."""
    injector = FaultInjector(plan, trace)
    _wrap(GroupLog, "record", before=lambda *_: injector.comes(recorder.phase))
    _wrap(Sampler, "batch", before=lambda *_: injector.comes("batch", begins=True))
    _wrap(FlightRecorder, "enter", after=lambda _, part: injector.comes(part, begins=True))

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and is_of_checkpoints(arguments):
            injector.comes("file")

    sys.addaudithook(hear)


def _nothing(*_: Any) -> None:
    """Is called where nobody listens."""


def _wrap(
    home: type,
    name: str,
    before: Callable[..., None] = _nothing,
    after: Callable[..., None] = _nothing,
) -> None:
    """Wraps a method so that listeners run around each call, with its arguments by position."""
    inner = getattr(home, name)

    @functools.wraps(inner)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = inner(*args, **kwargs)
        after(*args)
        return result

    setattr(home, name, wrapped)


if __name__ == "__main__":
    tempfile.tempdir = os.environ["DRILL_TEMPORARY"]
    if sys.argv[1]:
        arm(Plan(*json.loads(sys.argv[1])), Path(sys.argv[2]))
    main(sys.argv[3:], prog_name="shardgrad")
