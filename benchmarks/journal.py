"""CPU time that what is on by default adds to a step: the flight recorder, and the watch for lost numbers.

The same step of the same model is taken with and without it in turns, on two ranks, so that whatever slows
the machine down slows both. A ratio of one in a hundred is below what a busy machine lets anybody see, so the
parts are also timed alone, many times over, and added up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
from rich.table import Table

from benchmarks.measure import ratios, settle, spread
from benchmarks.options import common_options
from benchmarks.ranks import on_ranks
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_RANKS = 2
_MODES = ("without", "recorder", "default")
_TIMES = 2000  # that a part is repeated to be timed alone


@click.command()
@click.option("--preset", default="tiny", show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=200, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True, help="Steps in a round.")
@common_options
def main(preset: str, rounds: int, repeats: int, smoke: bool, out: Path | None) -> None:
    """Measure what is on by default, as a share of a step's CPU time."""
    if smoke:
        rounds, repeats = 2, 1
    started = environment()
    samples = on_ranks("benchmarks.recorder:measure", _RANKS, preset, rounds, repeats, keep_heap=True)
    import shardgrad.ops

    record = make_record(
        "recorder",
        environment=started,
        ops_backend=shardgrad.ops.backend(),
        config={"preset": preset, "ranks": _RANKS, "rounds": rounds, "repeats": repeats, "smoke": smoke},
        samples=samples,
        summary=_summary(samples),
    )
    _print(record)
    if out is not None:
        append(out, record)


def measure(preset: str, rounds: int, repeats: int) -> dict[str, Any]:
    """Returns CPU seconds of a step by mode and round, and of the parts alone."""
    from benchmarks.trainer import make_step
    from shardgrad.train.config import TrainConfig
    from shardgrad.train.health import NonfiniteCheck

    config = TrainConfig(preset=preset, steps=10**9, graph="off")
    step, place = make_step(config, "cpu")
    names = [name for name, p in step._state.model.named_parameters() if p.requires_grad]
    health = NonfiniteCheck(names, config.on_nonfinite, Path(), place)

    def work(mode: str) -> None:
        with _mode(mode, len(names)):
            result = step()
            if mode == "default":
                health.watch(step._state.step, result)

    for mode in _MODES:
        work(mode)
    settle()
    cpu_s: dict[str, list[float]] = {mode: [] for mode in _MODES}
    for number in range(rounds):
        first = number % len(_MODES)
        for mode in (*_MODES[first:], *_MODES[:first]):
            cpu_s[mode].append(_cpu_s(lambda mode=mode: work(mode), repeats))  # type: ignore[misc]
    return {"step_cpu_s": cpu_s, "parts": _parts(step, health)}


@contextmanager
def _mode(mode: str, parameters: int) -> Iterator[None]:
    """Takes out of the program, in the block, what the mode is without."""
    import torch

    from shardgrad.diagnosis.flight_recorder import Entry, FlightRecorder, GroupLog
    from shardgrad.train import step

    entry, sums = Entry(0, "", 0, "", 0), torch.zeros(parameters)

    # Functions as cheap as can be; a mock would cost more than what it stands for.
    def record(log: GroupLog, name: str, chunk: torch.Tensor | None) -> Entry:
        return entry

    def enter(recorder: FlightRecorder, part: str, *, step: int | None = None) -> None:
        return None

    def no_sums(parameters: list[torch.Tensor]) -> torch.Tensor:
        return sums

    with ExitStack() as stack:
        if mode == "without":
            stack.enter_context(mock.patch.object(GroupLog, "record", record))
            stack.enter_context(mock.patch.object(FlightRecorder, "enter", enter))
        if mode != "default":
            stack.enter_context(mock.patch.object(step, "gradient_sums", no_sums))
        yield


def _parts(step: Any, health: Any) -> dict[str, dict[str, float]]:
    """Returns how often a step does each part, and CPU seconds of one."""
    import torch

    from shardgrad.diagnosis.flight_recorder import FlightRecorder, GroupLog, recorder
    from shardgrad.train.health import gradient_sums

    with (
        mock.patch.object(GroupLog, "record", autospec=True, side_effect=GroupLog.record) as record,
        mock.patch.object(FlightRecorder, "enter", autospec=True, side_effect=FlightRecorder.enter) as enter,
    ):
        result = step()
    chunk = torch.zeros(1000)
    line = next(iter(recorder.group_logs()))
    parameters = [p for p in step._state.model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    parts: dict[str, tuple[int, Callable[[], object]]] = {
        "a collective noted": (record.call_count, lambda: line.record("all-gather of layers.3", chunk)),
        "a part noted": (enter.call_count, lambda: recorder.enter("forward")),
        "sums of gradients": (1, lambda: gradient_sums(parameters)),
        "the watch": (1, lambda: health.watch(1, result)),
    }
    return {
        name: {"times": times, "cpu_s": min(_cpu_s(part, _TIMES // 10) for _ in range(10))}
        for name, (times, part) in parts.items()
    }


def _cpu_s(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of one repetition, of all threads of this process."""
    began_s = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - began_s) / repeats


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratios of all rounds of both ranks; and the sum of the parts, of the rank where it is larger."""
    together = {mode: [s for rank in ranks for s in rank["step_cpu_s"][mode]] for mode in _MODES}
    step = spread(together["without"])
    parts_s = max(sum(of["times"] * of["cpu_s"] for of in rank["parts"].values()) for rank in ranks)
    return {
        "step_cpu_s": step,
        "ratio_to_without": {
            mode: spread(ratios(together[mode], together["without"])) for mode in _MODES if mode != "without"
        },
        "parts_of_step": parts_s / step["median"],
    }


def _print(record: dict[str, Any]) -> None:
    summary = record["summary"]
    table = Table("", "CPU time / without")
    table.title = f"a step of {summary['step_cpu_s']['median'] * 1e3:.1f} ms of CPU time"
    for mode, ratio in summary["ratio_to_without"].items():
        table.add_row(mode, "{:.4f} ({:.4f} .. {:.4f})".format(ratio["median"], *ratio["quartiles"]))
    table.add_row("default, by its parts", f"{1 + summary['parts_of_step']:.4f}")
    for name, of in record["samples"][0]["parts"].items():
        table.add_row(f"  {name}", f"{of['times']} x {of['cpu_s'] * 1e6:.1f} µs")
    show(table)


if __name__ == "__main__":
    main()
