"""shardgrad against FSDP2 and against two floors, interleaved in the same processes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import over_ranks, ratios, spread
from benchmarks.options import common_options, heap_option
from benchmarks.picture import draw, title
from benchmarks.ranks import on_ranks
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show
from benchmarks.task import ENGINES, Outcome, Task

_RESHARD = {"default": None, "true": True, "false": False}
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long, and on what.

    Attributes:
        ranks: processes.
        rounds: of which each times every contestant.
        steps: per contestant and round.
        warmup: steps of each contestant before the first round.
        memory: repeats of the memory measurement; 0 for none.
        keep_heap: whether the trainer's heap setting is in force.
        smoke: the numbers mean nothing.
    """

    ranks: int
    rounds: int
    steps: int
    warmup: int
    memory: int
    keep_heap: bool
    smoke: bool


@click.command()
@click.option("--preset", "presets", type=click.Choice(["tiny", "small"]), multiple=True, default=["tiny"])
@click.option(
    "--precision", "precisions", type=click.Choice(["fp32", "bf16"]), multiple=True, default=["fp32"]
)
@click.option(
    "--accumulate", type=click.IntRange(1), default=1, show_default=True, help="Micro-batches per step."
)
@click.option("--reshard", type=click.Choice(list(_RESHARD)), default="default", show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=40, show_default=True)
@click.option(
    "--steps", type=click.IntRange(1), default=5, show_default=True, help="Per contestant and round."
)
@click.option(
    "--warmup", type=click.IntRange(2), default=10, show_default=True, help="Steps before the first round."
)
@click.option(
    "--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Sequences per rank."
)
@click.option("--seq-len", type=click.IntRange(2), default=128, show_default=True)
@click.option(
    "--memory", type=click.IntRange(0), default=0, metavar="N", help="Measure peak memory N times too."
)
@heap_option
@common_options
def main(
    presets: Sequence[str],
    precisions: Sequence[str],
    accumulate: int,
    reshard: str,
    ranks: int,
    rounds: int,
    steps: int,
    warmup: int,
    batch_size: int,
    seq_len: int,
    memory: int,
    keep_heap: bool,
    smoke: bool,
    out: Path | None,
) -> None:
    """Compare training steps of shardgrad and FSDP2. --preset and --precision may be repeated."""
    plan = Plan(ranks, rounds, steps, warmup, memory, keep_heap, smoke)
    if smoke:
        plan = dataclasses.replace(plan, rounds=2, steps=1, warmup=2)
        batch_size, seq_len = 1, 16
    records = []
    for preset in presets:
        for precision in precisions:
            task = Task(preset, precision, accumulate, _RESHARD[reshard], batch_size, seq_len)
            record = _compare(task, plan)
            _print(record)
            if out is not None:
                append(out, record)
            records.append(record)
    if out is not None:
        draw(records, out / "compare.png")


def _compare(task: Task, plan: Plan) -> dict[str, Any]:
    started = environment()
    length = (plan.rounds, plan.steps, plan.warmup)
    run_contest = "benchmarks.contest:run_contest"
    outcomes = on_ranks(run_contest, plan.ranks, task, *length, keep_heap=plan.keep_heap)
    samples, summary = _summarise(outcomes)
    if plan.memory:
        for name, peaks in _measure_memory(task, plan).items():
            samples[name] |= peaks
            summary[name] |= {key: statistics.median(values) for key, values in peaks.items()}
    return make_record(
        "compare",
        environment=started,
        ops_backend=outcomes[0].ops_backend,
        config=dataclasses.asdict(task) | dataclasses.asdict(plan),
        samples=samples,
        summary=summary,
    )


def _summarise(outcomes: Sequence[Outcome]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns samples and summary, per contestant."""
    samples: dict[str, Any] = {}
    for name in outcomes[0].costs:
        rounds = [over_ranks(costs) for costs in zip(*(one.costs[name] for one in outcomes), strict=True)]
        samples[name] = {
            field: [getattr(cost, field) for cost in rounds]
            for field in ("wall_s", "cpu_s", "minor_faults", "loopback_nbytes")
        }
    for each in samples.values():
        each["wall_ratio_to_fsdp2"] = ratios(each["wall_s"], samples["fsdp2"]["wall_s"])
        each["cpu_ratio_to_fsdp2"] = ratios(each["cpu_s"], samples["fsdp2"]["cpu_s"])
    summary: dict[str, Any] = {
        name: {field: spread(values) for field, values in each.items()} for name, each in samples.items()
    }
    for name, count in outcomes[0].dtensors.items():
        summary[name]["dtensors_per_step"] = count
    summary["shardgrad"]["loss_difference_to_fsdp2"] = max(one.loss_difference for one in outcomes)
    return samples, summary


def _measure_memory(task: Task, plan: Plan) -> dict[str, dict[str, list[int]]]:
    """Per engine, peak memory of the heaviest rank: in all, and beyond what imports and the group took.

    Peaks cannot be told apart in one process, so each engine runs alone, in fresh ones, in turn.
    """
    run_memory = "benchmarks.contest:run_memory"
    peaks: dict[str, dict[str, list[int]]] = {name: {} for name in ENGINES}
    for number in range(plan.memory):
        for name in ENGINES if number % 2 == 0 else reversed(ENGINES):
            pairs = on_ranks(run_memory, plan.ranks, task, name, plan.warmup, keep_heap=plan.keep_heap)
            peaks[name].setdefault("peak_rss_nbytes", []).append(max(peak for _, peak in pairs))
            beyond = max(peak - baseline for baseline, peak in pairs)
            peaks[name].setdefault("peak_rss_beyond_imports_nbytes", []).append(beyond)
    return peaks


def _print(record: dict[str, Any]) -> None:
    ratio = "/ FSDP2"
    table = Table(
        "", "wall ms", "quartiles", ratio, "CPU ms", ratio, "faults", "lo MiB", "DTensors", "peak MiB"
    )
    table.title = title(record["config"]).replace("\n", ", ")
    for name, of in record["summary"].items():
        low, high = of["wall_s"]["quartiles"]
        peak = of.get("peak_rss_beyond_imports_nbytes")
        table.add_row(
            name,
            f"{of['wall_s']['median'] * 1e3:.2f}",
            f"{low * 1e3:.2f} .. {high * 1e3:.2f}",
            f"{of['wall_ratio_to_fsdp2']['median']:.3f}",
            f"{of['cpu_s']['median'] * 1e3:.2f}",
            f"{of['cpu_ratio_to_fsdp2']['median']:.3f}",
            f"{of['minor_faults']['median']:.0f}",
            f"{of['loopback_nbytes']['median'] / _MIB:.2f}",
            str(of.get("dtensors_per_step", "")),
            "" if peak is None else f"{peak / _MIB:.1f}",
        )
    table.caption = "medians per step; faults and CPU of a rank; lo counts every process of the machine"
    show(table)


if __name__ == "__main__":
    main()
