"""Runs a drill and judges it: exits in time, the right report, nothing left behind, a resumable
run.

A drill injects a fault into a run, or damages its checkpoint, and then resumes the run. The losses
have to be those of an undisturbed run: bitwise equal on the same number of ranks, close on another
number.
"""

from __future__ import annotations

import math
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from shardgrad.programs.train.rank import RANK_STATUS
from tests.drills.faults import Expectation, Fault
from tests.drills.injector import Trace
from tests.drills.processes import (
    PATIENT_S,
    STEPS,
    Command,
    Outcome,
    Program,
    ProgramRunner,
    losses,
)
from tests.drills.reports import read_accounts, reports_in

__all__ = ["Judge", "Verdict"]

_OTHER_WORLD = 0.25  # share of the runs that are resumed on another number of ranks
# Relative, for losses on other ranks: sums of fp32 in another order, over six steps.
_ROUNDING = 1e-4
_STOPPED = (130, -signal.SIGKILL)
_DRAWS = 4  # a drawn point may not occur: which ranks write which files depends on the state
_PREFIX = "shardgrad train: "
_HOME = Path(__file__).parents[2]


@dataclass(frozen=True)
class Verdict:
    """The result of a drill.

    Attributes:
        kind: name of the fault.
        seed: seed that repeats the drill.
        ranks: number of ranks of the disturbed run.
        place: rank, step and phase of the injection, as text.
        sentence: the last report that was printed.
        exit_s: seconds from the fault to the last exit.
        resumed_on: number of ranks of the resumed run; 0 if there was none.
        problems: deviations from the expected outcome; empty if there were none.
    """

    kind: str
    seed: int
    ranks: int
    place: str
    sentence: str
    exit_s: float
    resumed_on: int
    problems: tuple[str, ...]


class Judge:
    """Runs and judges drills in a folder, one after the other.

    Args:
        command: the `shardgrad` command line as a function of its arguments.
        folder: an empty folder; undisturbed runs are kept there as references.
        bound_s: largest allowed number of seconds from the fault to the last exit.
    """

    def __init__(self, command: Command, folder: Path, *, bound_s: float) -> None:
        self._runner = ProgramRunner(command, folder, bound_s=bound_s)
        self._folder = folder
        self._undisturbed: dict[Program, Path] = {}

    def hold(self, kind: Fault, seed: int) -> Verdict:
        """Runs one drill; everything that is drawn for it follows from the seed."""
        draw = random.Random(f"{kind.name} {seed}")
        run = self._folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        for _ in range(_DRAWS):
            program, plan = kind.draw(draw)
            outcome = self._runner.run(program, program.arguments(run), plan)
            if outcome.trace is not None or not outcome.succeeded:
                break
            shutil.rmtree(run, ignore_errors=True)
        problems = _judge(kind, outcome, run)
        resumed_on = 0
        plain = Program(program.ranks, program.options)
        if kind.expects is Expectation.SURVIVES:
            problems += self._compare(run, plain, plain.ranks)
        elif not (run / "checkpoints" / "latest").exists():
            problems.append("there is no complete checkpoint, though one had been written")
        elif (
            kind.expects is Expectation.STOPS and _saved_step(run) == STEPS
        ):  # asked to in its last step
            problems += self._compare(run, plain, plain.ranks, is_validated=False)
        else:
            resumed_on = self._other_world(plain, draw)
            problems += self._resume(run, plain, resumed_on)
        return Verdict(
            kind.name,
            seed,
            program.ranks,
            _place(outcome.trace),
            self._shortened(_sentence(outcome.words)),
            round(outcome.took_s, 3),
            resumed_on,
            tuple(map(self._shortened, problems)),
        )

    def _reference(self, program: Program) -> Path:
        """Returns the folder of an undisturbed run of this program."""
        if program not in self._undisturbed:
            folder = self._folder / f"undisturbed{len(self._undisturbed)}"
            patient = ("--keep", "3", "--timeout", str(PATIENT_S))
            outcome = self._runner.run(program, [*program.arguments(folder), *patient])
            if not outcome.succeeded:
                raise RuntimeError(f"the program does not even run undisturbed: {outcome.words}")
            self._undisturbed[program] = folder
        return self._undisturbed[program]

    def _shortened(self, words: str) -> str:
        """Returns text with paths relative to the drill's folder and to the repository."""
        return words.replace(f"{self._folder}/", "").replace(f"{_HOME}/", "")

    @staticmethod
    def _other_world(program: Program, draw: random.Random) -> int:
        others = [ranks for ranks in (1, 2, 3, 4) if ranks != program.ranks]
        return draw.choice(others) if draw.random() < _OTHER_WORLD else program.ranks

    def _resume(self, run: Path, program: Program, ranks: int) -> list[str]:
        arguments = program.resumption(run, ranks=None if ranks == program.ranks else ranks)
        outcome = self._runner.run(Program(ranks), arguments)
        if not outcome.succeeded:
            return [f"the resume on {ranks} ranks failed: {outcome.words[-500:]}"]
        if outcome.left or outcome.litter:
            return [f"the resumed run left behind: {outcome.left} {outcome.litter}"]
        return self._compare(run, program, ranks)

    def _compare(
        self, run: Path, program: Program, ranks: int, *, is_validated: bool = True
    ) -> list[str]:
        """Returns what is wrong with the losses of a run that has made all steps, and its
        validation.
        """
        ours, theirs = losses(run), losses(self._reference(program))
        if not is_validated:
            ours.pop(-1, None)
            theirs.pop(-1)
        if set(ours) != set(theirs):
            return [f"steps are missing or too many: {sorted(ours)}"]
        limit = 0.0 if ranks == program.ranks else _ROUNDING
        wrong = [
            step for step in theirs if not math.isclose(ours[step], theirs[step], rel_tol=limit)
        ]
        return [f"losses differ at {wrong} (-1 is the validation)"] if wrong else []


def _saved_step(run: Path) -> int:
    """Returns which step the newest checkpoint is of."""
    latest = (run / "checkpoints" / "latest").read_text(encoding="ascii")
    return int(latest.strip().removeprefix("step_"))


def _judge(kind: Fault, outcome: Outcome, run: Path) -> list[str]:
    problems = []
    trace = outcome.trace
    if trace is None:
        return [f"the fault never struck: {outcome.words[-300:]}"]
    if not outcome.ended:
        problems.append(
            f"not everything ended within the bound: {outcome.statuses}, left {outcome.left}"
        )
    if outcome.litter:
        problems.append(f"left behind: {outcome.litter}")
    if "Traceback" in outcome.words:
        problems.append(f"a traceback was printed: {outcome.words[-500:]}")
    if kind.expects is Expectation.SURVIVES:
        return (
            problems
            if outcome.succeeded
            else [*problems, f"it did not survive: {outcome.words[-300:]}"]
        )
    if kind.expects is Expectation.STOPS:
        if not all(status in _STOPPED for status in outcome.statuses):
            problems.append(
                f"exit statuses {outcome.statuses} are not those of a stop: {outcome.words}"
            )
        return problems
    if any(status == 0 for status in outcome.statuses):
        problems.append(f"a rank ended with 0: {outcome.statuses}")
    sentence = _sentence(outcome.words)
    # Another launcher prints by which signal a rank ended, not the program.
    words = () if outcome.statuses[1:] and kind.expects is Expectation.ENDS else kind.words
    problems += [
        f"the sentence does not say {word!r}: {sentence}" for word in words if word not in sentence
    ]
    reports = reports_in(outcome.words, read_accounts(run / RANK_STATUS))
    if not reports:
        problems.append(f"nothing was reported: {outcome.words[-300:]}")
    for report in reports:
        names_the_rank = kind.expects is Expectation.ENDS
        problems += report.wrong_claims(trace) if names_the_rank else report.missing_claims(trace)
    return problems


def _place(trace: Trace | None) -> str:
    if trace is None:
        return "nowhere"
    last = f", {trace.recent[-1]}" if trace.recent else ""
    return f"rank {trace.plan_rank}, step {trace.step}, {trace.part}{last}"


def _sentence(words: str) -> str:
    """Returns the last report that the program printed."""
    said = [line.removeprefix(_PREFIX) for line in words.splitlines() if line.startswith(_PREFIX)]
    return said[-1] if said else ""
