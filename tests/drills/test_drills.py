"""Faults in the training program: every rank ends within the bound and the faulty rank and the step
are named; nothing is left behind; and a resumed run has the losses of an undisturbed one, the same
bits on as many ranks, close ones on others.

`make drills` injects each kind once at a drawn place; `DRILLS=9 make drills` nine times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.drills.faults import CATALOGUE, EVERY, STEPS, TIMEOUT_S, Expectation, Plan
from tests.support.processes import orphaned_segments
from tests.support.programs import Program

BOUND_S = 60.0  # from the fault to the last end; who takes longer hangs
PATIENT_S = 60.0  # `--timeout` where nothing is to break: a busy machine may be slow
SEQUENCES = 12  # in a global batch: every number of ranks up to 4 divides it
OTHER_RANKS = 0.25  # share of the runs that are resumed on another number of ranks
# Relative, for losses on other ranks: sums of fp32 in another order, over six steps.
ROUNDING = 1e-4
STOPPED = (130, -signal.SIGKILL)
DRAWS = 4  # a drawn place may not occur: which ranks write which files depends on the state
PREFIX = "shardgrad train: "

Losses = dict[int, float]  # of every step
Undisturbed = Callable[[int], Losses]  # of a run on so many ranks


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        status: of the program; negative for a signal, None if it was killed.
        words: what was written to standard error.
        struck: whether the program came to the place of the action.
        left: segments of shared memory and temporary files.
    """

    status: int | None
    words: str
    struck: bool
    left: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        return self.status == 0 and not self.left


# -- running


def new_run(folder: Path, ranks: int, *options: str) -> list[str]:
    """Returns the command line of a run."""
    settings: dict[str, Any] = {
        "--steps": STEPS, "--checkpoint-every": EVERY, "--keep": 2, "--seq-len": 16,
        "--batch-size": SEQUENCES // ranks, "--log-every": 1, "--sample-bytes": 0,
        "--timeout": TIMEOUT_S,
        "--data": argparse.__file__, "--run-dir": folder, "--ranks": ranks,
    }  # fmt: skip
    words = [str(word) for pair in settings.items() for word in pair]
    return ["train", "--device", "cpu", *words, *options]


def run(arguments: Sequence[str], folder: Path, plan: Plan | None = None) -> Ending:
    """Runs `shardgrad` to its end, with the injector if there is a plan.

    Args:
        arguments: of the command line.
        folder: for the trace and temporary files.
        plan: the fault.
    """
    trace, temporary = folder / "trace.json", folder / "temporary"
    trace.unlink(missing_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    shared = orphaned_segments()
    words = ["" if plan is None else json.dumps(plan), str(trace), *arguments]
    with mock.patch.dict(os.environ, {"DRILL_TEMPORARY": str(temporary)}):
        program = Program("tests.drills.injector", *words, forks=True)
    status = _wait(program, trace)
    errors = program.communicate()[1]
    left = (*(orphaned_segments() - shared), *os.listdir(temporary))
    return Ending(status, errors, trace.exists(), left)


def _wait(program: Program, trace: Path) -> int | None:
    """Returns the exit status; who is not over in time is killed, and has None."""
    deadline_s = time.monotonic() + 4 * BOUND_S  # until an action sets it
    while _is_alive(program):
        if trace.exists():
            deadline_s = float(trace.read_text()) + BOUND_S
        if time.monotonic() > deadline_s:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            return None
        time.sleep(0.02)
    return program.poll()


def _is_alive(program: Program) -> bool:
    """Returns whether a program or a process that it has started is there."""
    if program.poll() is None:
        return True
    try:
        os.killpg(program.pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- judging


def judge(plan: Plan, ending: Ending) -> None:
    """Requires of a disturbed run what its fault expects."""
    fault, words = CATALOGUE[plan.fault], ending.words
    assert ending.struck, f"the fault never struck: {words}"
    assert ending.status is not None, f"not everything ended within {BOUND_S:.0f} s"
    assert not ending.left
    bugs = ("exception on one rank", "data ends early on one rank")  # for the program
    assert "Traceback" not in words or plan.fault in bugs, words
    if fault.expects is Expectation.SURVIVES:
        assert ending.succeeded, words
        return
    if fault.expects is Expectation.STOPS:
        assert ending.status in STOPPED, words
        return
    assert ending.status != 0
    said = [line.removeprefix(PREFIX) for line in words.splitlines() if line.startswith(PREFIX)]
    # What the launcher says knows how a rank ended, and not where.
    reports = [line for line in said if "esume with: " in line]
    assert reports, f"how to resume is not said: {words}"
    assert [word for word in fault.words if word not in said[-1]] == [], said
    for report in reports:
        if re.match(r"Rank \d+ (was ended by|ended with)", report):
            continue
        steps = [int(step) for step in re.findall(r"\bstep (\d+)\b", report)]
        # Ranks are less than a step apart.
        assert steps, report
        assert all(abs(step - plan.step) <= 1 for step in steps), report
        if fault.expects is Expectation.ENDS:
            assert plan.rank in _accused(report), report


def _accused(report: str) -> list[int]:
    """Returns the rank that a report names first, unless it names several."""
    named = re.search(r"\b[Rr]anks? (\d+(?:(?:, | and )\d+)*)", report)
    ranks = [] if named is None else [int(rank) for rank in re.findall(r"\d+", named[1])]
    return ranks if len(ranks) == 1 else []


def losses(folder: Path) -> Losses:
    found = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # the last line of a process that was killed
            event = json.loads(line)
            if event["event"] == "step":
                found[event["step"]] = event["loss"]
    return found


def assert_alike(ours: Losses, theirs: Losses, limit: float) -> None:
    """Requires the losses of a run that has made all steps."""
    assert ours.keys() == theirs.keys(), "steps are missing or too many"
    wrong = [step for step in theirs if not math.isclose(ours[step], theirs[step], rel_tol=limit)]
    assert not wrong, "losses differ at these steps"


# -- drills


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    def made(ranks: int) -> Losses:
        folder = tmp_path_factory.mktemp(f"undisturbed-{ranks}")
        ending = run(new_run(folder / "run", ranks, "--timeout", str(PATIENT_S)), folder)
        assert ending.succeeded, f"the program does not even run undisturbed: {ending.words}"
        return losses(folder / "run")

    return cache(made)


@pytest.mark.long
@pytest.mark.timeout(10 * BOUND_S)
@pytest.mark.parametrize("seed", range(int(os.environ.get("DRILLS", "1"))))
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_fault_ends_in_time_is_named_and_is_recovered_from(
    name: str, seed: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    fault, draw, folder = CATALOGUE[name], random.Random(f"{name} {seed}"), tmp_path / "run"
    for _ in range(DRAWS):
        shutil.rmtree(folder, ignore_errors=True)
        ranks, plan = fault.draw(draw)
        ending = run(new_run(folder, ranks), tmp_path, plan)
        if ending.struck or not ending.succeeded:
            break
    judge(plan, ending)
    limit, latest = 0.0, folder / "checkpoints" / "latest"
    if fault.expects is not Expectation.SURVIVES:
        assert latest.exists(), "there is no complete checkpoint, though one had been written"
        if latest.read_text() != f"step_{STEPS:06d}\n":  # else stopped in its last step
            others = [number for number in (1, 2, 3, 4) if number != ranks]
            on = draw.choice(others) if draw.random() < OTHER_RANKS else ranks
            again = ["train", "--resume", str(folder), "--timeout", str(PATIENT_S)]
            resumed = run([*again, "--ranks", str(on)], tmp_path)
            assert resumed.succeeded, (resumed.words[-500:], resumed.left)
            limit = 0.0 if on == ranks else ROUNDING
    assert_alike(losses(folder), undisturbed(ranks), limit)
