"""pack, unpack and sum_chunks, compiled and reference, beside a plain copy of as many bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import cost_of, ratios, settle, spread
from benchmarks.options import common_options
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_PRESETS = ("tiny", "small", "medium")


@click.command()
@click.option(
    "--preset", type=click.Choice(_PRESETS), default="small", show_default=True, help="Whose block."
)
@click.option(
    "--ranks", type=click.IntRange(1), default=2, show_default=True, help="That the block is cut over."
)
@click.option("--rounds", type=click.IntRange(2), default=40, show_default=True)
@common_options
def main(preset: str, ranks: int, rounds: int, smoke: bool, out: Path | None) -> None:
    """Measure the ops on one block's parameters, on one core."""
    import torch

    import shardgrad.ops
    from benchmarks.kernel_cases import make_cases

    if smoke:
        preset, rounds = "tiny", 2
    torch.set_num_threads(1)
    settle()
    started = environment()
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for case in make_cases(preset, ranks):
        seconds = _interleave(case.calls, rounds)
        samples[case.name] = {"nbytes": case.nbytes, "cpu_s": seconds}
        summary[case.name] = {
            name: {
                "gb_per_s": spread([case.nbytes / each / 1e9 for each in values]),
                "ratio_to_copy": spread(ratios(values, seconds["copy"])),
            }
            for name, values in seconds.items()
        }
    record = make_record(
        "kernels",
        environment=started,
        ops_backend=shardgrad.ops.backend(),
        config={"preset": preset, "ranks": ranks, "rounds": rounds, "smoke": smoke},
        samples=samples,
        summary=summary,
    )
    _print(record)
    if out is not None:
        append(out, record)


def _interleave(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns CPU seconds per call and round."""
    for call in calls.values():
        call()
    repeats = {
        name: math.ceil(2e-3 / max(cost_of(call, repeats=1).cpu_s, 1e-5)) for name, call in calls.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in calls if number % 2 == 0 else reversed(calls):
            seconds[name].append(cost_of(calls[name], repeats=repeats[name]).cpu_s)
    return seconds


def _print(record: dict[str, Any]) -> None:
    table = Table("", "", "GB/s", "quartiles", "time / copy")
    table.title = f"a block of {record['config']['preset']} over {record['config']['ranks']} ranks, one core"
    for case, by_name in record["summary"].items():
        for name, of in by_name.items():
            low, high = of["gb_per_s"]["quartiles"]
            table.add_row(
                case,
                name,
                f"{of['gb_per_s']['median']:.2f}",
                f"{low:.2f} .. {high:.2f}",
                f"{of['ratio_to_copy']['median']:.2f}",
            )
        table.add_section()
    show(table)


if __name__ == "__main__":
    main()
