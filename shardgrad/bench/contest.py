"""The contest as the parent sees it: crews take turns, round by round; who fails is a row with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardgrad.bench.catalogue import BASE, CATALOGUE, obstacle
from shardgrad.bench.crew import ENTRY, Crew, CrewFailed, Turn
from shardgrad.bench.energy import EnergyMeter
from shardgrad.bench.measure import Cost, over_ranks
from shardgrad.bench.memory import lack_of_memory
from shardgrad.bench.observation import Observation
from shardgrad.bench.task import Length, Task

__all__ = ["Contest", "Disagreement", "Measured", "Outcome", "disagreement", "run_contest"]

# Of losses, relative. Below fp32, engines may round sums differently; a wrong gradient shows as far more.
_TOLERANCES = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.02}

Tell = Callable[[str], None]


class Disagreement(Exception):
    """A contestant does not compute what the base computes, so that their speeds cannot be compared."""


@dataclass
class Measured:
    """What was measured of a contestant, round by round.

    Attributes:
        costs: over all ranks, per step.
        host_s: until the call of a single step returned, on the slowest rank; empty on a CPU.
        joules: per step, of the devices or the machine; empty where nothing tells.
        rounds: the number of each round, by which contestants are paired.
        loss_difference: largest to the base, relative; None for floors, and where there is no base.
        observations: of each rank.
    """

    costs: list[Cost] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    loss_difference: float | None = None
    observations: list[Observation] = field(default_factory=list)


@dataclass
class Outcome:
    """Of a whole contest.

    Attributes:
        measured: by contestant.
        left_out: why each of the others has no numbers, in a sentence.
        disagreed: those of them that computed something else.
        unobserved: why contestants that have times have nothing else.
        hardware: what the first crew found.
    """

    measured: dict[str, Measured] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    disagreed: list[str] = field(default_factory=list)
    unobserved: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)


def run_contest(
    task: Task, length: Length, names: Sequence[str], logs: Path, tell: Tell, *, entry: str = ENTRY
) -> Outcome:
    """Measures contestants in turn; nothing that happens to one of them stops it.

    Args:
        task: what each does.
        length: how often.
        names: keys of the catalogue, the base first if it takes part.
        logs: folder for what their processes print.
        tell: hears what is going on.
        entry: what runs in their processes; see `Seat`.
    """
    contest = Contest(task, length, logs, tell, entry=entry)
    waiting = []
    for name in names:
        reason = obstacle(name, task) or lack_of_memory(name, task)
        if reason is None:
            waiting.append(name)
        else:
            contest.leave_out(name, reason)
    with contest:
        while waiting:
            waiting = contest.wave(waiting)
    return contest.outcome


class Contest:
    """Crews that are alive together, and what they have shown so far.

    Contestants that do not fit into memory together are measured in waves; the base is in each of them, so
    every contestant is compared with it in the same round.

    Args:
        task: what each does.
        length: how often.
        logs: folder for what processes print.
        tell: hears what is going on.
        entry: what runs in processes; see `Seat`.
    """

    def __init__(self, task: Task, length: Length, logs: Path, tell: Tell, *, entry: str = ENTRY) -> None:
        self.outcome = Outcome()
        self._task, self._length, self._logs, self._tell = task, length, logs, tell
        self._entry = entry
        self._crews: dict[str, Crew] = {}
        self._base_losses: list[float] = []
        self._until_s = time.monotonic() + length.limit_s
        self._round = 0
        self._meter = EnergyMeter.find(task.device)

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *_: object) -> None:
        for crew in self._crews.values():
            crew.close()

    def leave_out(self, name: str, reason: str) -> None:
        """Notes why a contestant has no numbers."""
        self._tell(f"{name}: {reason}")
        self.outcome.measured.pop(name, None)
        self.outcome.left_out[name] = reason
        if name in self._crews:
            self._crews.pop(name).close()

    def wave(self, names: Sequence[str]) -> list[str]:
        """Measures as many as fit together; returns those that have to wait for the next wave."""
        deferred = self._gather(names)
        self._take_turns()
        for name in list(self._crews):
            try:
                self.outcome.measured[name].observations = self._crews[name].call("observe")
            except CrewFailed as failure:
                # Its times are good, but it can take no more turns.
                self.outcome.unobserved[name] = str(failure)
                self._crews.pop(name).close()
            if name in self._crews and (name != BASE or not deferred):
                self._crews.pop(name).close()
        return deferred

    def _gather(self, names: Sequence[str]) -> list[str]:
        """Builds and warms up crews until memory runs out; returns those for which there was none."""
        for number, name in enumerate(names):
            others = set(self._crews) - {BASE}
            if others and time.monotonic() > self._until_s - self._length.limit_s / 2:
                self.leave_out(name, "no time left to start it: raise --limit-s, or name fewer engines")
                continue
            self._tell(f"{name}: {CATALOGUE[name].words}")
            try:
                self._warm_up(name)
            except CrewFailed as failure:
                if failure.is_memory and others:
                    self._crews.pop(name).close()
                    return list(names[number:])
                beside = f" beside {BASE}" if BASE in self._crews and name != BASE else ""
                self.leave_out(
                    name, f"out of memory{beside}: {failure}" if failure.is_memory else str(failure)
                )
            except Disagreement as words:
                self.leave_out(name, str(words))
                self.outcome.disagreed.append(name)
        return []

    def _warm_up(self, name: str) -> None:
        log = self._logs / f"{name}.log"
        crew = Crew(name, self._task, self._length.answer_s, log, entry=self._entry)
        self._crews[name] = crew
        crew.ready()
        if not self.outcome.hardware:
            self.outcome.hardware = crew.call("hardware")[0]
        # Means over ranks: one process that takes every rank's batch has nothing else.
        by_rank: list[list[float]] = crew.call("warm_up", self._length.warmup)
        losses = [sum(step) / len(step) for step in zip(*by_rank, strict=True)]
        if name == BASE:
            self._base_losses = losses
        measured = Measured()
        if self._base_losses and CATALOGUE[name].trains:
            measured.loss_difference = disagreement(name, losses, self._base_losses, self._task)
        self.outcome.measured[name] = measured

    def _take_turns(self) -> None:
        first = self._round
        while self._round - first < self._length.rounds and self._crews:
            if self._round - first >= 2 and time.monotonic() > self._until_s:
                self._tell("no time left for more rounds")
                break
            self._tell(f"round {self._round - first + 1} of {self._length.rounds}")
            order = list(self._crews)
            for name in order if self._round % 2 == 0 else reversed(order):
                with self._supervised(name):
                    self._turn(name)
            self._round += 1

    def _turn(self, name: str) -> None:
        before = self._meter.joules() if self._meter else None
        turns: list[Turn] = self._crews[name].call("turn", self._length.steps)
        measured = self.outcome.measured[name]
        used = self._meter.joules() - before if self._meter and before is not None else -1.0
        if used >= 0:  # some counters start again from zero
            measured.joules.append(used / self._length.steps)
        measured.costs.append(over_ranks([turn.cost for turn in turns]))
        host_s = [turn.host_s for turn in turns if turn.host_s is not None]
        if host_s:
            measured.host_s.append(max(host_s))
        measured.rounds.append(self._round)

    @contextmanager
    def _supervised(self, name: str) -> Iterator[None]:
        try:
            yield
        except CrewFailed as failure:
            self.leave_out(name, f"{failure}, round {self._round + 1}")


def disagreement(name: str, losses: Sequence[float], base: Sequence[float], task: Task) -> float:
    """Returns the largest relative difference of losses, one per step, to the base's.

    Raises:
        Disagreement: it is larger than rounding explains.
    """
    tolerance = _TOLERANCES[task.precision]
    if task.precision == "fp32" and task.ranks <= 2 and CATALOGUE[name].exact and not task.clip:
        tolerance = 0.0
    largest = 0.0
    for step, (loss, expected) in enumerate(zip(losses, base, strict=True)):
        difference = abs(loss - expected) / abs(expected) if loss != expected else 0.0
        if not difference <= tolerance:  # NaN is wrong too
            raise Disagreement(
                f"its loss of step {step} is {loss:.9g}, that of {BASE} is {expected:.9g}; "
                f"{tolerance:g} may be between them, relative. No times are reported."
            )
        largest = max(largest, difference)
    return largest
