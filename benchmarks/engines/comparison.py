"""Engines side by side, as the parent sees them: they take turns; one that fails is a row with a
reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines.catalogue import BASE, ENGINES, obstacle
from benchmarks.engines.task import Length, Task
from benchmarks.engines.trace import Observation
from benchmarks.measure import Cost, in_turn, over_ranks
from benchmarks.workers import ThisMachine, Workers, WorkersFailed

RANK = "benchmarks.engines.rank:Rank"

# Of losses, relative. Below fp32, engines may round sums differently; a wrong gradient shows as
# more.
_TOLERANCES = {"fp32": 1e-4, "bf16": 0.01}

Tell = Callable[[str], None]


class Disagreement(Exception):
    """An engine does not compute what the base computes, so that their speeds cannot be
    compared.
    """


@dataclass
class Measured:
    """What was measured of an engine, round by round.

    Attributes:
        costs: over all ranks, per step.
        rounds: the number of each round, by which engines are paired.
        loss_difference: largest to the base, relative; None for floors, and where there is no base.
        observations: of each rank.
    """

    costs: list[Cost] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    loss_difference: float | None = None
    observations: list[Observation] = field(default_factory=list)


@dataclass
class Outcome:
    """Of a comparison.

    Attributes:
        measured: by engine.
        left_out: why each of the others has no numbers, in a sentence.
        disagreed: those of them that computed something else.
        unobserved: why engines that have times have nothing else.
        hardware: what the first workers found.
    """

    measured: dict[str, Measured] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    disagreed: list[str] = field(default_factory=list)
    unobserved: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)


def compare(
    task: Task,
    length: Length,
    names: Sequence[str],
    logs: Path,
    tell: Tell,
    *,
    serves: str = RANK,
    on: ThisMachine | None = None,
) -> Outcome:
    """Measures engines in turn; nothing that happens to one of them stops it.

    Args:
        task: what each does.
        length: how often.
        names: keys of the catalogue, the base first if it takes part.
        logs: folder for what their processes print.
        tell: hears what is going on.
        serves: what runs in their processes; see `Worker`.
        on: what starts their processes.
    """
    comparison = _Comparison(task, length, logs, tell, serves, on)
    waiting = []
    for name in names:
        reason = obstacle(name, task)
        if reason is None:
            waiting.append(name)
        else:
            comparison.leave_out(name, reason)
    try:
        while waiting:
            waiting = comparison.wave(waiting)
    finally:
        comparison.close()
    return comparison.outcome


class _Comparison:
    """Workers that are alive together, and what they have shown so far.

    Engines that do not fit into memory together are measured in waves; the base is in each of them,
    so that every engine is compared with it in the same round. The arguments are those of
    `compare`.
    """

    def __init__(
        self,
        task: Task,
        length: Length,
        logs: Path,
        tell: Tell,
        serves: str,
        on: ThisMachine | None,
    ) -> None:
        self.outcome = Outcome()
        self._task, self._length, self._logs, self._tell = task, length, logs, tell
        self._serves, self._on = serves, on
        self._workers: dict[str, Workers] = {}
        self._base_losses: list[float] = []
        self._until_s = time.monotonic() + length.limit_s
        self._round = 0

    def close(self) -> None:
        for workers in self._workers.values():
            workers.close()

    def leave_out(self, name: str, reason: str) -> None:
        """Notes why an engine has no numbers."""
        self._tell(f"{name}: {reason}")
        self.outcome.measured.pop(name, None)
        self.outcome.left_out[name] = reason
        if name in self._workers:
            self._workers.pop(name).close()

    def wave(self, names: Sequence[str]) -> list[str]:
        """Measures as many as fit together; returns those that have to wait for the next wave."""
        deferred = self._start(names)
        self._take_turns()
        for name in list(self._workers):
            try:
                self.outcome.measured[name].observations = self._workers[name].call("observe")
            except WorkersFailed as failure:
                # Its times are good, but it can take no more turns.
                self.outcome.unobserved[name] = str(failure)
                self._workers.pop(name).close()
            if name in self._workers and (name != BASE or not deferred):
                self._workers.pop(name).close()
        return deferred

    def _start(self, names: Sequence[str]) -> list[str]:
        """Builds and warms up engines until memory runs out; returns those for which there was
        none.
        """
        for number, name in enumerate(names):
            others = set(self._workers) - {BASE}
            if others and time.monotonic() > self._until_s - self._length.limit_s / 2:
                self.leave_out(
                    name, "no time left to start it: raise --limit-s, or name fewer engines"
                )
                continue
            self._tell(f"{name}: {ENGINES[name].words}")
            try:
                self._warm_up(name)
            except WorkersFailed as failure:
                if failure.is_memory and others:
                    self._workers.pop(name).close()
                    return list(names[number:])
                beside = f" beside {BASE}" if BASE in self._workers and name != BASE else ""
                self.leave_out(
                    name, f"out of memory{beside}: {failure}" if failure.is_memory else str(failure)
                )
            except Disagreement as words:
                self.leave_out(name, str(words))
                self.outcome.disagreed.append(name)
        return []

    def _warm_up(self, name: str) -> None:
        task = self._task
        workers = self._workers[name] = Workers(
            self._serves,
            (name, task),
            task.ranks,
            self._length.answer_s,
            self._on,
            device=task.device,
            share_device=task.share_device,
            log=str(self._logs / f"{name}.log"),
        )
        workers.ready()
        if not self.outcome.hardware:
            self.outcome.hardware = workers.call("hardware")[0]
        by_rank: list[list[float]] = workers.call("warm_up", self._length.warmup)
        losses = [sum(step) / len(step) for step in zip(*by_rank, strict=True)]
        if name == BASE:
            self._base_losses = losses
        measured = Measured()
        if self._base_losses and ENGINES[name].trains:
            measured.loss_difference = disagreement(name, losses, self._base_losses, task)
        self.outcome.measured[name] = measured

    def _take_turns(self) -> None:
        first = self._round
        while self._round - first < self._length.rounds and self._workers:
            if self._round - first >= 2 and time.monotonic() > self._until_s:
                self._tell("no time left for more rounds")
                break
            self._tell(f"round {self._round - first + 1} of {self._length.rounds}")
            for name in in_turn(list(self._workers), self._round):
                try:
                    self._turn(name)
                except WorkersFailed as failure:
                    self.leave_out(name, f"{failure}, round {self._round + 1}")
            self._round += 1

    def _turn(self, name: str) -> None:
        costs: list[Cost] = self._workers[name].call("turn", self._length.steps)
        measured = self.outcome.measured[name]
        measured.costs.append(over_ranks(costs))
        measured.rounds.append(self._round)


def disagreement(name: str, losses: Sequence[float], base: Sequence[float], task: Task) -> float:
    """Returns the largest relative difference of losses, one per step, to the base's.

    Raises:
        Disagreement: it is larger than rounding explains.
    """
    tolerance = _TOLERANCES[task.precision]
    if task.precision == "fp32" and task.ranks <= 2 and ENGINES[name].exact and not task.clip:
        tolerance = 0.0
    largest = 0.0
    for step, (loss, expected) in enumerate(zip(losses, base, strict=True)):
        difference = abs(loss / expected - 1)
        if not difference <= tolerance:  # NaN is wrong too
            raise Disagreement(
                f"its loss of step {step} is {loss:.9g}, that of {BASE} is {expected:.9g}; "
                f"{tolerance:g} may be between them, relative. No times are reported."
            )
        largest = max(largest, difference)
    return largest
