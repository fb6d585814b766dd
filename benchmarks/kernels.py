"""The ops, compiled and reference, beside a plain copy of as many bytes and torch's own where it has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import cost_on, ratios, settle, spread
from benchmarks.options import common_options, device_option
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
@click.option(
    "--ops",
    "which",
    type=click.Choice(("movement", "segments")),
    default="movement",
    show_default=True,
    help="Packing and summing on a block's parameters, or optimizer updates and norms.",
)
@click.option(
    "--numel",
    type=click.IntRange(1),
    default=2**24,
    show_default=True,
    help="Of the large parameter of updates and norms.",
)
@click.option("--rounds", type=click.IntRange(2), default=40, show_default=True)
@device_option
@common_options
def main(
    preset: str,
    ranks: int,
    which: str,
    numel: int,
    rounds: int,
    device: str,
    smoke: bool,
    out: Path | None,
) -> None:
    """Measure the ops beside a plain copy, on one core or a GPU."""
    import torch

    import shardgrad.ops
    from benchmarks.kernel_cases import Case, make_cases, make_segment_cases

    if smoke:
        preset, rounds, numel = "tiny", 2, 2**14
    torch.set_num_threads(1)
    torch.set_default_device(device)
    clock = "cpu_s" if device == "cpu" else "wall_s"
    settle()
    started = environment()
    samples: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    config: dict[str, Any] = {"preset": preset, "ranks": ranks}
    cases: Iterable[Case] = make_cases(preset, ranks)
    if which == "segments":
        config = {"numel": numel, "tiny": 100 if smoke else 10_000}
        cases = make_segment_cases(**config)
    for case in cases:
        seconds = _interleave(case.calls, rounds, device, clock)
        samples[case.name] = {"nbytes": case.nbytes, clock: seconds}
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
        config={"ops": which} | config | {"device": device, "rounds": rounds, "smoke": smoke},
        samples=samples,
        summary=summary,
    )
    _print(record)
    if out is not None:
        append(out, record)


def _interleave(
    calls: dict[str, Callable[[], object]], rounds: int, device: str, clock: str
) -> dict[str, list[float]]:
    """Returns seconds per call and round."""

    def seconds_of(name: str, repeats: int) -> float:
        return float(getattr(cost_on(device, calls[name], repeats=repeats), clock))

    for name in calls:
        seconds_of(name, 1)
    repeats = {name: math.ceil(2e-3 / max(seconds_of(name, 1), 1e-5)) for name in calls}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in calls if number % 2 == 0 else reversed(calls):
            seconds[name].append(seconds_of(name, repeats[name]))
    return seconds


def _print(record: dict[str, Any]) -> None:
    table = Table("", "", "GB/s", "quartiles", "time / copy")
    table.title = ", ".join(f"{name} {value}" for name, value in record["config"].items())
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
