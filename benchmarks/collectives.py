"""gloo's own all-gather and reduce-scatter against the engine's exchange transport.

Both end in the same place: every rank has all shards, or its sum. The engine reads gathered shards where they
arrived, so its own shard is not copied; its sum over ranks is a separate op, which is part of what is timed.
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

_KIB, _MIB = 2**10, 2**20
_OPERATIONS = ("all_gather", "reduce_scatter")
_TRANSPORTS = ("gloo", "exchange")


@click.command()
@click.option("--ranks", "worlds", type=click.IntRange(2), multiple=True, default=[2, 4], show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True)
@click.option("--max-mib", type=click.IntRange(1), default=16, show_default=True, help="Largest shard.")
@common_options
def main(worlds: Sequence[int], rounds: int, max_mib: int, smoke: bool, out: Path | None) -> None:
    """Measure both transports for shards of 4 KiB and up, in fp32. --ranks may be repeated."""
    shards = [nbytes for nbytes in (4 * _KIB * 4**power for power in range(13)) if nbytes <= max_mib * _MIB]
    if smoke:
        worlds, rounds, shards = [2], 2, shards[:2]
    for ranks in worlds:
        started = environment()
        answers = on_ranks("benchmarks.transports:run", ranks, shards, rounds, keep_heap=False)
        samples, summary = _summarise([costs for costs, _ in answers])
        record = make_record(
            "collectives",
            environment=started,
            ops_backend=answers[0][1],
            config={"ranks": ranks, "rounds": rounds, "shard_nbytes": shards, "smoke": smoke},
            samples=samples,
            summary=summary,
        )
        _print(record)
        if out is not None:
            append(out, record)


def _summarise(by_rank: Sequence[dict[Any, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns samples and summary by operation, shard size and transport."""
    samples: dict[str, Any] = {operation: {} for operation in _OPERATIONS}
    summary: dict[str, Any] = {operation: {} for operation in _OPERATIONS}
    for operation, nbytes in by_rank[0]:
        here: dict[str, Any] = {}
        for name in _TRANSPORTS:
            one_per_rank = (costs[operation, nbytes][name] for costs in by_rank)
            rounds = [over_ranks(costs) for costs in zip(*one_per_rank, strict=True)]
            fields = ("wall_s", "cpu_s", "loopback_nbytes")
            here[name] = {field: [getattr(cost, field) for cost in rounds] for field in fields}
        of: dict[str, Any] = {
            name: {field: spread(values) for field, values in each.items()} for name, each in here.items()
        }
        for field in ("wall", "cpu"):
            pairs = ratios(here["exchange"][f"{field}_s"], here["gloo"][f"{field}_s"])
            of["exchange"][f"{field}_ratio_to_gloo"] = spread(pairs)
        samples[operation][nbytes], summary[operation][nbytes] = here, of
    return samples, summary


def _print(record: dict[str, Any]) -> None:
    columns = ("gloo ms", "exchange ms", "/ gloo", "CPU / gloo", "gloo lo KiB", "exchange lo KiB")
    table = Table("", "shard KiB", *columns)
    table.title = f"{record['config']['ranks']} ranks, fp32; medians"
    for operation, by_nbytes in record["summary"].items():
        for nbytes, of in by_nbytes.items():
            table.add_row(
                operation,
                f"{nbytes // _KIB}",
                *(f"{of[name]['wall_s']['median'] * 1e3:.3f}" for name in _TRANSPORTS),
                f"{of['exchange']['wall_ratio_to_gloo']['median']:.3f}",
                f"{of['exchange']['cpu_ratio_to_gloo']['median']:.3f}",
                *(f"{of[name]['loopback_nbytes']['median'] / _KIB:.0f}" for name in _TRANSPORTS),
            )
    show(table)


if __name__ == "__main__":
    main()
