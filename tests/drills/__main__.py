"""`python -m tests.drills`: injects faults into the training program and judges what comes of each.

Every rank has to end within the bound and to name the faulty rank and the step; nothing may be left
behind; and a resumed run has to give the losses of an undisturbed one: the same bits on the same
number of ranks, close ones on another.
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
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import click

from benchmarks.records import environment
from tests.drills.faults import CATALOGUE, EVERY, STEPS, TIMEOUT_S, Expectation, Fault
from tests.drills.injector import Plan, Trace
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


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        status: of the program; negative for a signal, None if it was killed.
        words: what was written to standard error.
        trace: of the action; None if the program never came to its place.
        took_s: seconds from the action, or from the start, to the last end.
        left: segments of shared memory and temporary files.
    """

    status: int | None
    words: str
    trace: Trace | None
    took_s: float
    left: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        return self.status == 0 and not self.left

    @property
    def sentence(self) -> str:
        """The last report."""
        said = [line for line in self.words.splitlines() if line.startswith(PREFIX)]
        return said[-1].removeprefix(PREFIX) if said else ""


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
    temporary.mkdir()
    shared, began_s = orphaned_segments(), time.monotonic()
    words = ["" if plan is None else json.dumps(dataclasses.asdict(plan)), str(trace), *arguments]
    with mock.patch.dict(os.environ, {"DRILL_TEMPORARY": str(temporary)}):
        program = Program("tests.drills.injector", *words, forks=True)
    status = _wait(program, trace)
    found = Trace.read(trace)
    took_s = time.monotonic() - (began_s if found is None else found.at_s)
    errors = program.communicate()[1]
    left = (*(orphaned_segments() - shared), *os.listdir(temporary))
    return Ending(status, errors, found, took_s, left)


def _wait(program: Program, trace: Path) -> int | None:
    """Returns the exit status; who is not over in time is killed, and has None."""
    deadline_s = time.monotonic() + 4 * BOUND_S  # until an action sets it
    while _is_alive(program):
        found = Trace.read(trace)
        if found is not None:
            deadline_s = found.at_s + BOUND_S
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


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a drill: what was drawn, the last report, and what is wrong with it."""

    kind: str
    seed: int
    ranks: int
    place: str
    sentence: str
    exit_s: float
    resumed_on: int
    problems: tuple[str, ...]


def drill(fault: Fault, seed: int, folder: Path) -> Verdict:
    """Injects a fault, and resumes; everything that is drawn for it follows from the seed."""
    draw, run_folder = random.Random(f"{fault.name} {seed}"), folder / "run"
    for _ in range(DRAWS):
        shutil.rmtree(run_folder, ignore_errors=True)
        ranks, plan = fault.draw(draw)
        arguments = new_run(run_folder, ranks)
        ending = run(arguments, folder, plan)
        if ending.trace is not None or not ending.succeeded:
            break
    problems, resumed_on = problems_of(fault, ending), 0
    latest = run_folder / "checkpoints" / "latest"
    if fault.expects is Expectation.SURVIVES:
        problems += _unlike(run_folder, folder, ranks)
    elif not latest.exists():
        problems.append("there is no complete checkpoint, though one had been written")
    elif latest.read_text(encoding="ascii").strip() == f"step_{STEPS:06d}":  # stopped in its last
        problems += _unlike(run_folder, folder, ranks)
    else:
        others = [number for number in (1, 2, 3, 4) if number != ranks]
        resumed_on = draw.choice(others) if draw.random() < OTHER_RANKS else ranks
        sized = ("--ranks", str(resumed_on))
        again = ["train", "--resume", str(run_folder), "--timeout", str(PATIENT_S), *sized]
        resumed = run(again, folder)
        if not resumed.succeeded:
            problems.append(f"the resumed run: {resumed.words[-500:]} {resumed.left}")
        limit = 0.0 if resumed_on == ranks else ROUNDING
        problems += _unlike(run_folder, folder, ranks, limit=limit)
    place = "nowhere"
    if (trace := ending.trace) is not None:
        place = f"rank {trace.rank}, step {trace.step}, {trace.part}"
    told = [text.replace(f"{folder}/", "") for text in (ending.sentence, *problems)]
    took_s = round(ending.took_s, 3)
    return Verdict(fault.name, seed, ranks, place, told[0], took_s, resumed_on, tuple(told[1:]))


def problems_of(fault: Fault, ending: Ending) -> list[str]:
    """Returns what is wrong with how a disturbed run ended."""
    trace, words, sentence = ending.trace, ending.words, ending.sentence
    if trace is None:
        return [f"the fault never struck: {words[-300:]}"]
    problems = [f"left behind: {ending.left}"] if ending.left else []
    if ending.status is None:
        problems.append(f"not everything ended within {BOUND_S:.0f} s")
    if "Traceback" in words:
        problems.append(f"a traceback was printed: {words[-500:]}")
    if fault.expects is Expectation.SURVIVES:
        return problems if ending.succeeded else [*problems, f"it did not survive: {words[-300:]}"]
    if fault.expects is Expectation.STOPS:
        is_stop = ending.status in STOPPED
        return problems if is_stop else [*problems, f"{ending.status}: {words[-300:]}"]
    if ending.status == 0:
        problems.append("it ended with 0")
    problems += [
        f"{word!r} is not said: {sentence}" for word in fault.words if word not in sentence
    ]
    if "esume with: " not in sentence:
        problems.append(f"how to resume is not said: {words[-300:]}")
    # What the launcher says knows how a rank ended, and not where.
    reports = [line.removeprefix(PREFIX) for line in words.splitlines() if "esume with: " in line]
    knows_where = [r for r in reports if not re.match(r"Rank \d+ (was ended by|ended with)", r)]
    for report in knows_where:
        steps = [int(step) for step in re.findall(r"\bstep (\d+)\b", report)]
        # Ranks are less than a step apart.
        if not steps or any(abs(step - trace.step) > 1 for step in steps):
            problems.append(f"it was in step {trace.step}: {report}")
    if fault.expects is Expectation.ENDS:
        problems += [
            f"it was rank {trace.rank}: {report}"
            for report in knows_where
            if trace.rank not in _accused(report)
        ]
    return problems


def _accused(report: str) -> list[int]:
    """Returns the rank that a report names first, unless it names several."""
    named = re.search(r"\b[Rr]anks? (\d+(?:(?:, | and )\d+)*)", report)
    ranks = [] if named is None else [int(rank) for rank in re.findall(r"\d+", named[1])]
    return ranks if len(ranks) == 1 else []


def losses(folder: Path) -> dict[int, float]:
    """Returns the loss of every step of a run."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # the last line of a process that was killed
            event = json.loads(line)
            if event["event"] == "step":
                found[event["step"]] = event["loss"]
    return found


@cache
def _undisturbed(folder: Path, ranks: int) -> dict[int, float]:
    reference = folder / f"undisturbed on {ranks}"
    ending = run(new_run(reference, ranks, "--timeout", str(PATIENT_S)), folder)
    if not ending.succeeded:
        raise RuntimeError(f"the program does not even run undisturbed: {ending.words}")
    return losses(reference)


def _unlike(
    run_folder: Path,
    folder: Path,
    ranks: int,
    *,
    limit: float = 0.0,
) -> list[str]:
    """Returns what is wrong with the losses of a run that has made all steps."""
    ours, theirs = losses(run_folder), _undisturbed(folder, ranks)
    if set(ours) != set(theirs):
        return [f"steps are missing or too many: {sorted(ours)}"]
    wrong = [step for step in theirs if not math.isclose(ours[step], theirs[step], rel_tol=limit)]
    return [f"losses differ at {wrong}"] if wrong else []


# -- the command line


@click.command()
@click.option("--count", type=int, help="Number of drills.  [default: one of each kind]")
@click.option("--kind", "kinds", multiple=True, help="Only kinds with this in their name.")
@click.option("--seed", type=int, default=0, help="Of the drawn ranks, steps and places.")
@click.option("--record", type=click.Path(path_type=Path), help="Append verdicts to this file.")
@click.option("--list", "is_list", is_flag=True, help="List the kinds of faults and exit.")
def main(
    count: int | None, kinds: tuple[str, ...], seed: int, record: Path | None, is_list: bool
) -> None:
    """Inject every kind of fault into the training program, and judge what comes of it.

    A tiny model trains on 1 to 4 ranks on this machine's CPU, with one fault. The exit status is 1
    if any drill was wrong.
    """
    chosen = [kind for kind in CATALOGUE if not kinds or any(words in kind.name for words in kinds)]
    if not chosen:
        raise click.UsageError(f"No kind of fault is called {' or '.join(kinds)}: see --list.")
    if is_list:
        click.echo("\n".join(f"{kind.name}: {kind.expects.value}" for kind in chosen))
        return
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="shardgrad-drill-") as folder:
        for number in range(count or len(chosen)):
            kind, drawn = chosen[number % len(chosen)], seed + number // len(chosen)
            verdict = drill(kind, drawn, Path(folder))
            wrong += bool(verdict.problems)
            mark = "wrong" if verdict.problems else "right"
            click.echo(f"{mark}: {verdict.kind} ({verdict.place}), {verdict.exit_s:.1f} s")
            for line in verdict.problems or (verdict.sentence,):
                click.echo(f"    {line}")
            if record is not None:
                with record.open("a", encoding="utf-8") as stream:
                    line = {**dataclasses.asdict(verdict), "environment": environment()}
                    stream.write(json.dumps(line) + "\n")
    click.echo(f"{count or len(chosen)} drills, {wrong} of them wrong.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(prog_name="python -m tests.drills")
