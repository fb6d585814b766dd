"""CPU time that what is on by default adds to a step: the flight recorder, and the watch for lost
numbers.

The same step of the same model is taken with and without it in turns, on two ranks, so that
whatever slows the machine down slows both. A ratio of one in a hundred is less than a busy machine
shows, so the parts are also timed alone, many times over, and added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import click
import torch

from benchmarks.measure import interleaved, summarise
from benchmarks.run import Run, option
from benchmarks.trainer import make_step
from benchmarks.workers import on_ranks
from shardgrad.diagnosis.flight_recorder import Entry, FlightRecorder, GroupLog, recorder
from shardgrad.programs.train.config import TrainConfig

_RANKS = 2
_MODES = ("without", "default")
_TIMES = 200  # repetitions of a part in one timing


@click.command()
@option("--preset", default="tiny", help="Model.")
@option("--rounds", type=click.IntRange(2), default=200, help="Turns of each mode.")
@option("--repeats", type=click.IntRange(1), default=2, help="Steps in a turn.")
@click.pass_obj
def main(run: Run, preset: str, rounds: int, repeats: int) -> None:
    """Measure what is on by default, as a share of a step's CPU time."""
    if run.smoke:
        rounds, repeats = 2, 1
    ranks = on_ranks("benchmarks.flight_recorder:measure", _RANKS, preset, rounds, repeats)
    # The rounds of all ranks: each has a CPU time of its process.
    together = {mode: [cost for costs, _ in ranks for cost in costs[mode]] for mode in _MODES}
    summary: dict[str, Any] = summarise(together, "without", "cpu_s")
    parts_s = max(sum(of["times"] * of["cpu_s"] for of in parts.values()) for _, parts in ranks)
    step_s = summary["without"]["cpu_s"]["median"]
    summary["default"]["parts_of_step"] = parts_s / step_s
    run.finish(
        "flight_recorder",
        config={"preset": preset, "ranks": _RANKS, "rounds": rounds, "repeats": repeats},
        samples=[
            {mode: {"cpu_s": [cost.cpu_s for cost in costs[mode]]} for mode in _MODES}
            | {"parts": parts}
            for costs, parts in ranks
        ],
        summary=summary | {f"part: {name}": of for name, of in ranks[0][1].items()},
    )


def measure(preset: str, rounds: int, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a rank's costs of a step by mode; and how often a step does each part, with its CPU
    seconds.
    """
    config = TrainConfig(preset=preset, steps=10**9, graph="off")
    step, _ = make_step(config, "cpu")

    def work(mode: str) -> None:
        with _mode(mode):
            step()

    costs = interleaved({mode: partial(work, mode) for mode in _MODES}, rounds, repeats=repeats)
    return costs, _parts(step)


@contextmanager
def _mode(mode: str) -> Iterator[None]:
    """Takes out of the program, in the block, what the mode is without."""
    entry = Entry(0, "", 0, "", 0)

    # Functions as cheap as can be; a mock would cost more than what it stands for.
    def record(log: GroupLog, name: str, chunk: torch.Tensor | None) -> Entry:
        return entry

    def enter(recorder: FlightRecorder, phase: str, *, step: int | None = None) -> None:
        return None

    with ExitStack() as stack:
        if mode == "without":
            stack.enter_context(mock.patch.object(GroupLog, "record", record))
            stack.enter_context(mock.patch.object(FlightRecorder, "enter", enter))
        yield


def _parts(step: Any) -> dict[str, dict[str, float]]:
    with (
        mock.patch.object(GroupLog, "record", autospec=True, side_effect=GroupLog.record) as record,
        mock.patch.object(
            FlightRecorder, "enter", autospec=True, side_effect=FlightRecorder.enter
        ) as enter,
    ):
        step()
    chunk = torch.zeros(1000)
    log = next(iter(recorder.group_logs()))
    parts: dict[str, tuple[int, Callable[[], object]]] = {
        "a collective": (record.call_count, lambda: log.record("all-gather of layers.3", chunk)),
        "a part of the step": (enter.call_count, lambda: recorder.enter("forward")),
    }
    costs = interleaved({name: part for name, (_, part) in parts.items()}, 10, repeats=_TIMES)
    return {
        name: {"times": times, "cpu_s": min(cost.cpu_s for cost in costs[name])}
        for name, (times, _) in parts.items()
    }
