"""Does anything grow while a model trains for long, or when models are built and deleted?"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.options import common_options
from benchmarks.ranks import on_ranks
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_WORK = {
    "eager": ("benchmarks.soak_work:train", 2),
    "graphed": ("benchmarks.soak_work:train_graphed", 1),
    "models": ("benchmarks.soak_work:build_and_delete", 2),
}
_WARM = 0.2  # of the looks: caches, lazily made buffers, the allocator's arenas
# What a process may hold more at the end than after the warm-up.
_ALLOWED = {"resident_nbytes": 8 * 2**20, "tensors": 0, "objects": 64, "descriptors": 0, "threads": 0}


@click.command()
@click.option("--preset", default="tiny", show_default=True)
@click.option("--steps", type=click.IntRange(40), default=20_000, show_default=True)
@click.option("--models", type=click.IntRange(40), default=200, show_default=True)
@click.option("--mode", "modes", type=click.Choice(list(_WORK)), multiple=True, help="[default: all]")
@common_options
def main(preset: str, steps: int, models: int, modes: tuple[str, ...], smoke: bool, out: Path | None) -> None:
    """Repeat, and compare what every process holds after the warm-up and at the end.

    The exit status is 1 if anything has grown.
    """
    if smoke:
        steps, models = 40, 40
    looks = 10 if smoke else 40
    started = environment()
    samples: dict[str, list[Any]] = {}
    for mode in modes or tuple(_WORK):
        function, ranks = _WORK[mode]
        times = models if mode == "models" else steps
        arguments = (preset, times, looks, "cpu", "off") if mode == "eager" else (preset, times, looks)
        samples[mode] = on_ranks(function, ranks, *arguments, keep_heap=True, timeout_s=24 * 3600)
    import shardgrad.ops

    summary = {mode: _summary(of) for mode, of in samples.items()}
    record = make_record(
        "soak",
        environment=started,
        ops_backend=shardgrad.ops.backend(),
        config={"preset": preset, "steps": steps, "models": models, "smoke": smoke},
        samples=samples,
        summary=summary,
    )
    _print(record)
    if out is not None:
        append(out, record)
    sys.exit(0 if all(of["is_flat"] for of in summary.values()) else 1)


def _summary(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Growth from the end of the warm-up to the last look, of the rank where it is largest; step times."""
    found: dict[str, Any] = {}
    for what in _ALLOWED:
        found[what] = max(_growth([look[what] for look in looks]) for looks in ranks)
    times = [look["step_s"] for look in ranks[0][int(_WARM * len(ranks[0])) :]]
    part = max(1, len(times) // 16)  # of 20,000 steps, the first and the last thousand
    found["step_s_first"], found["step_s_last"] = (
        statistics.median(times[:part]),
        statistics.median(times[-part:]),
    )
    found["is_flat"] = all(found[what] <= most for what, most in _ALLOWED.items())
    return found


def _growth(values: list[int]) -> int:
    """What was added between the end of the warm-up and the end.

    The smallest of a few looks on either side, since what a look catches in the middle of its life is gone at
    the next.
    """
    warm = values[int(_WARM * len(values)) :]
    side = max(1, len(warm) // 8)
    return min(warm[-side:]) - min(warm[:side])


def _print(record: dict[str, Any]) -> None:
    counts = ("tensors", "objects", "descriptors", "threads")
    table = Table("", "resident", *counts, "step ms first", "last", "flat")
    table.title = "growth after the warm-up"
    for mode, of in record["summary"].items():
        table.add_row(
            mode,
            f"{of['resident_nbytes'] / 2**20:+.1f} MiB",
            *(f"{of[what]:+d}" for what in counts),
            *(f"{1e3 * of[what]:.1f}" for what in ("step_s_first", "step_s_last")),
            "yes" if of["is_flat"] else "no",
        )
    show(table)


if __name__ == "__main__":
    main()
