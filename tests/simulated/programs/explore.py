"""Random scenarios until so many different interleavings were seen, or one has a hazard or a wrong
loss.

python -m tests.simulated.programs.explore --interleavings 100000 --seed 1 --processes 2

Every process has simulated devices of its own. Scenario number n of a seed is the same however many
processes take turns. The run is recorded in benchmarks/results/interleavings.jsonl.
"""

from __future__ import annotations

import multiprocessing as mp
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.records import RESULTS
from benchmarks.run import Run
from tests.simulated.accelerator import build
from tests.simulated.programs.scenarios import (
    Model,
    Places,
    Plan,
    Scenario,
    plain_plans,
    some_scenario,
)

Digest = tuple[int, ...]

# Steps of a scenario, by ranks. On one rank each step counts, so many share the cost of building
# the model. On several only the whole counts; the first step is ordered by the host, so there are a
# few more.
STEPS = {1: 64, 2: 4, 4: 3}
_SHARES = {1: 40, 2: 2, 4: 1}
_NOTE_EVERY_S = 30.0
SHRINK_S = 30.0  # for making a scenario that went wrong smaller


@dataclass(frozen=True)
class _Report:
    """What a process has to say of one scenario.

    Attributes:
        failure: "", or all about what went wrong.
    """

    number: int
    ranks: int
    digests: tuple[Digest, ...]
    failure: str


@dataclass
class Found:
    """What was found so far.

    Attributes:
        distinct: one entry for each interleaving that is not like another.
        scenarios, interleavings: how many ran, by number of ranks.
        failure: "", or the first hazard, wrong loss or error, with the scenario.
        curve: now and then (seconds, interleavings, distinct ones).
    """

    distinct: set[Digest] = field(default_factory=set)
    scenarios: Counter[int] = field(default_factory=Counter)
    interleavings: Counter[int] = field(default_factory=Counter)
    failure: str = ""
    curve: list[tuple[float, int, int]] = field(default_factory=list)
    wall_s: float = 0.0

    def take(self, report: _Report) -> None:
        """Counts a scenario."""
        self.scenarios[report.ranks] += 1
        self.interleavings[report.ranks] += len(report.digests)
        self.distinct.update(report.digests)
        self.failure = report.failure

    def note(self) -> None:
        """Adds a point to the curve."""
        self.curve.append((round(self.wall_s, 1), self.interleavings.total(), len(self.distinct)))

    def distinct_by_ranks(self) -> dict[int, int]:
        """Returns how many are different, by number of ranks: a digest has a number for each."""
        return dict(Counter(map(len, self.distinct)))


def scenario_of(seed: int, number: int) -> Scenario:
    """Returns one of the scenarios of a seed."""
    generator = random.Random(f"{seed} {number}")
    (ranks,) = generator.choices(list(_SHARES), weights=list(_SHARES.values()))
    return some_scenario(generator.choice, ranks=ranks, steps=STEPS[ranks])


def digests_of(scenario: Scenario, *, shrink_s: float = SHRINK_S) -> tuple[Digest, ...]:
    """Runs a scenario; returns the digests of its interleavings.

    Raises:
        Exception: for a hazard, a wrong loss, or whatever a rank raised. What is raised is that of
            a smaller scenario, if one was found in `shrink_s`. A note shows it, to be pasted.
    """
    wrong = _what_is_wrong(scenario)
    if isinstance(wrong, tuple):
        return wrong
    deadline = time.monotonic() + shrink_s
    trying = _smaller(scenario)
    while time.monotonic() < deadline and (candidate := next(trying, None)) is not None:
        found = _what_is_wrong(candidate)
        if type(found) is type(wrong):
            scenario, wrong = candidate, found
            trying = _smaller(scenario)
    wrong.add_note(f"The scenario was\n{scenario!r}")
    raise wrong


def _what_is_wrong(scenario: Scenario) -> tuple[Digest, ...] | Exception:
    """Returns an exception, or the digests if there is none."""
    from tests.simulated.programs.running import require_right, run

    try:
        outcome = run(scenario)
        require_right(scenario, outcome)
    except Exception as error:
        return error
    return tuple(outcome.digests)


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yields scenarios that are simpler by one thing, the big things first."""
    model, plans = scenario.model, scenario.plans
    (plain,) = plain_plans(model.depth, 1)
    for i in range(len(plans) if len(plans) > 1 else 0):
        yield replace(scenario, plans=plans[:i] + plans[i + 1 :])
    for each in fields(Model):
        if (
            each.name not in ("ranks", "depth", "branches")
            and getattr(model, each.name) != each.default
        ):
            yield replace(scenario, model=replace(model, **{each.name: each.default}))
    for i, plan in enumerate(plans):
        for simpler in (plain, *_simpler_plans(plan)):
            if simpler != plan:
                yield replace(scenario, plans=(*plans[:i], simpler, *plans[i + 1 :]))


def _simpler_plans(plan: Plan) -> Iterator[Plan]:
    yield from (replace(plan, caller=0), replace(plan, stem=0), replace(plan, skipped=()))
    for i, places in enumerate(plan.units):
        of_one = (0,) * len(places.branches)
        for simpler in (
            Places(0, of_one),
            replace(places, runs=0, branches=of_one if len(of_one) == 1 else places.branches),
            replace(places, branches=of_one if len(of_one) > 1 else places.branches),
            replace(places, hooks=None),
        ):
            yield replace(plan, units=(*plan.units[:i], simpler, *plan.units[i + 1 :]))


# -- processes


def _work(pipe: Connection, path: list[str], seed: int, first: int, stride: int) -> None:
    """The life of a process: one scenario after another, until it is ended."""
    sys.path[:] = path
    import torch

    from tests.simulated.accelerator import device
    from tests.simulated.programs.running import expected

    # Of unused parameters and late streams, which are here on purpose.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device.install()
    number = first
    while True:
        scenario = scenario_of(seed, number)
        digests: tuple[Digest, ...] = ()
        failure = ""
        try:
            digests = digests_of(scenario)
        except Exception:
            failure = f"scenario {number} of seed {seed}:\n{traceback.format_exc()}"
        expected.cache_clear()  # no model comes twice
        pipe.send(_Report(number, scenario.model.ranks, digests, failure))
        number += stride


@contextmanager
def _processes(count: int, seed: int) -> Iterator[list[Connection]]:
    context = mp.get_context("spawn")
    started, pipes = [], []
    for first in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(theirs, sys.path, seed, first, count), daemon=True
        )
        process.start()
        theirs.close()
        started.append(process)
        pipes.append(ours)
    try:
        yield pipes
    finally:
        for process in started:
            process.kill()
            process.join()


def explore(goal: int, *, seed: int, processes: int, limit_s: float) -> Found:
    """Runs scenarios until `goal` different interleavings were seen, one failed, or time is up."""
    found = Found()
    started = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:.0f}/s"),
        TimeElapsedColumn(),
    )
    with _processes(processes, seed) as pipes, Progress(*columns) as progress:
        bar = progress.add_task("different interleavings", total=goal, speed=0.0)
        while len(found.distinct) < goal and found.wall_s < limit_s and not found.failure:
            for pipe in wait(pipes, timeout=1.0):
                try:
                    found.take(pipe.recv())
                except EOFError:
                    found.failure = "a process died"
                if found.failure:
                    break
            found.wall_s = time.monotonic() - started
            speed = len(found.distinct) / found.wall_s
            progress.update(bar, completed=len(found.distinct), speed=speed)
            if found.wall_s >= _NOTE_EVERY_S * len(found.curve):
                found.note()
                if not progress.console.is_terminal:  # where the bar is not seen before the end
                    print(
                        f"{found.wall_s:.0f} s: {len(found.distinct)} of {goal}, {speed:.0f}/s",
                        flush=True,
                    )
    found.note()
    return found


# -- the program


@click.command()
@click.option("--interleavings", type=click.IntRange(1), default=100_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=None, help="Stop after so long."
)
@click.option("--smoke", is_flag=True, help="A few seconds, to see that it runs.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the record.  [default: benchmarks/results; with --smoke: nothing is written]",
)
def main(
    interleavings: int,
    seed: int,
    processes: int,
    minutes: float | None,
    smoke: bool,
    out: Path | None,
) -> None:
    """Look for hazards and wrong losses in different interleavings."""
    run = Run(smoke=smoke, out=out or (None if smoke else RESULTS))
    if smoke:
        interleavings = 50
    build.build()  # here, so that the processes do not wait for each other
    limit_s = float("inf") if minutes is None else 60 * minutes
    found = explore(interleavings, seed=seed, processes=processes, limit_s=limit_s)
    run.finish(
        "interleavings",
        config={
            "interleavings": interleavings,
            "seed": seed,
            "processes": processes,
            "minutes": minutes,
            "steps": STEPS,
            "shares": _SHARES,
        },
        samples={"curve": found.curve},
        summary=_summarise(found),
    )
    if found.failure:
        print(found.failure)
        sys.exit(1)


def _summarise(found: Found) -> dict[str, Any]:
    distinct = found.distinct_by_ranks()
    return {
        "distinct": len(found.distinct),
        "interleavings": found.interleavings.total(),
        "wall_s": found.wall_s,
        "per_s": len(found.distinct) / found.wall_s,
        "failure": found.failure,
        "by_ranks": {
            ranks: {
                "scenarios": found.scenarios[ranks],
                "interleavings": found.interleavings[ranks],
                "distinct": distinct.get(ranks, 0),
            }
            for ranks in sorted(found.scenarios)
        },
    }


if __name__ == "__main__":
    main()
