"""From which size on does a parameter travel faster by itself than packed with others?

A step of a few units whose weights all have the same size, once with every weight in a message of its own and
once with all packed, on the same ranks, round by round in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import over_ranks, ratios, spread
from benchmarks.options import common_options
from benchmarks.ranks import on_ranks
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_KIB = 2**10
_WAYS = ("packed", "direct")


@click.command()
@click.option("--ranks", "worlds", type=click.IntRange(2), multiple=True, default=[2, 4], show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=21, show_default=True)
@common_options
def main(worlds: Sequence[int], rounds: int, smoke: bool, out: Path | None) -> None:
    """Measure both ways for pieces of 64 KiB to 8 MiB a rank, in fp32. --ranks may be repeated."""
    pieces = [64 * _KIB * 2**power for power in range(8)]
    if smoke:
        worlds, rounds, pieces = [2], 2, pieces[:2]
    for ranks in worlds:
        started = environment()
        answers = on_ranks("benchmarks.direct_work:run", ranks, pieces, rounds, keep_heap=True)
        samples: dict[int, Any] = {}
        summary: dict[int, Any] = {}
        for nbytes in pieces:
            here: dict[str, list[float]] = {}
            for way in _WAYS:
                one_per_rank = (costs[nbytes, way] for costs, _ in answers)
                here[way] = [over_ranks(costs).wall_s for costs in zip(*one_per_rank, strict=True)]
            samples[nbytes] = here
            summary[nbytes] = {way: spread(of) for way, of in here.items()}
            summary[nbytes]["ratio"] = spread(ratios(here["direct"], here["packed"]))
        record = make_record(
            "direct",
            environment=started,
            ops_backend=answers[0][1],
            config={"ranks": ranks, "rounds": rounds, "piece_nbytes": pieces, "smoke": smoke},
            samples=samples,
            summary=summary,
        )
        _print(record)
        if out is not None:
            append(out, record)


def _print(record: dict[str, Any]) -> None:
    table = Table("piece KiB", "packed ms", "direct ms", "direct / packed", "quartiles")
    table.title = f"{record['config']['ranks']} ranks, fp32; a step, medians"
    for nbytes, of in record["summary"].items():
        table.add_row(
            f"{nbytes // _KIB}",
            *(f"{of[way]['median'] * 1e3:.2f}" for way in _WAYS),
            f"{of['ratio']['median']:.3f}",
            " to ".join(f"{quartile:.3f}" for quartile in of["ratio"]["quartiles"]),
        )
    show(table)


if __name__ == "__main__":
    main()
