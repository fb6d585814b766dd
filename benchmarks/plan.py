"""Does what `shardgrad plan` predicts happen? Memory and step time, predicted and measured, on CPU ranks."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.measure import spread
from benchmarks.options import common_options
from benchmarks.plan_task import Task
from benchmarks.ranks import on_ranks
from benchmarks.record import append, environment, make_record
from benchmarks.tables import show

_MIB = 2**20
_STEPS = 3  # of the memory measurement: the second has all that a steady step has


@dataclasses.dataclass(frozen=True)
class Extent:
    """How long.

    Attributes:
        rounds: of the time measurement.
        repeats: of the memory measurement, each in fresh processes.
        smoke: the numbers mean nothing.
    """

    rounds: int
    repeats: int
    smoke: bool


@click.command()
@click.option("--preset", type=click.Choice(["tiny", "small", "medium"]), default="small", show_default=True)
@click.option("--ranks", "worlds", type=click.IntRange(2), multiple=True, default=[2, 4], show_default=True)
@click.option(
    "--precision", "precisions", type=click.Choice(["fp32", "bf16"]), multiple=True, default=["fp32"]
)
@click.option("--stage", type=click.Choice(["1", "2", "3", "hfsdp"]), default="3", show_default=True)
@click.option("--accumulate", type=click.IntRange(1), default=1, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=4, show_default=True)
@click.option("--seq-len", type=click.IntRange(2), default=256, show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=10, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@common_options
def main(
    preset: str,
    worlds: Sequence[int],
    precisions: Sequence[str],
    stage: str,
    accumulate: int,
    batch_size: int,
    seq_len: int,
    rounds: int,
    repeats: int,
    smoke: bool,
    out: Path | None,
) -> None:
    """Compare plans with what ranks of this machine measure. --ranks and --precision may be repeated."""
    if stage == "hfsdp" and any(ranks < 4 or ranks % 2 for ranks in worlds):
        raise click.UsageError("--stage hfsdp needs replicas of two ranks each: use --ranks 4.")
    extent = Extent(rounds, repeats, smoke)
    override: tuple[tuple[str, int], ...] = ()
    if smoke:
        extent, worlds = Extent(2, 1, smoke), worlds[:1]
        override, batch_size, seq_len = (("layers", 1),), 1, 32
    for ranks in worlds:
        for precision in precisions:
            task = Task(preset, override, precision, stage, accumulate, batch_size, seq_len)
            record = _compare(task, ranks, extent)
            _print(record)
            if out is not None:
                append(out, record)


def _compare(task: Task, ranks: int, extent: Extent) -> dict[str, Any]:
    started = environment()
    memory = "benchmarks.plan_ranks:run_memory"
    peaks = []
    for _ in range(extent.repeats):
        pairs = on_ranks(memory, ranks, task, _STEPS, keep_heap=False)
        peaks.append(max(peak - baseline for baseline, peak in pairs))
    everyone = on_ranks("benchmarks.plan_ranks:run_times", ranks, task, extent.rounds, keep_heap=True)
    measured = [
        {name: statistics.fmean(getattr(one, name) for one in rounds) for name in _FIELDS}
        for rounds in zip(*(times.rounds for times in everyone), strict=True)
    ]
    predicted = _predict(task, ranks, measured)
    return make_record(
        "plan",
        environment=started,
        ops_backend=_ops_backend(),
        config=dataclasses.asdict(task) | {"ranks": ranks} | dataclasses.asdict(extent),
        samples={"peak_nbytes": peaks, "rounds": measured, "predicted_step_s": predicted["step_s"]},
        summary=_summarise(peaks, measured, predicted),
    )


_FIELDS = ("step_s", "compute_s", "bandwidth", "hop_s", "link_bandwidth")


def _predict(task: Task, ranks: int, measured: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Plans the task: memory once, and a step time with the constants of each round."""
    from shardgrad.plan.hardware import Link, machine_of
    from shardgrad.plan.planning import Calibration, plan_of
    from shardgrad.plan.rehearsal import rehearse
    from shardgrad.plan.request import Request

    request = Request(
        preset=task.preset,
        override=dict(task.override),
        ranks=ranks,
        mesh="x".join(map(str, task.mesh_shape(ranks))),
        stage=task.stage,
        precision="fp32" if task.precision == "fp32" else "bf16-mixed",
        batch_size=task.batch_size,
        seq_len=task.seq_len,
        accumulate=task.accumulate,
        on_host=True,
    )
    rehearsal = rehearse(request)
    usual = machine_of("cpu", is_graphed=True)  # the compute that is measured has its launches in it
    plans = []
    for one in measured:
        device = dataclasses.replace(usual.device, bandwidth=one["bandwidth"])
        hop = (one["hop_s"],) * 3
        link = Link("loopback", one["link_bandwidth"], hop, hop, "measured in this round")
        machine = dataclasses.replace(usual, device=device, link=link, devices_per_node=ranks)
        plans.append(plan_of(rehearsal, machine, Calibration(compute_s=one["compute_s"])))
    return {"peak_nbytes": plans[0].peak_nbytes, "step_s": [plan.timeline.step_s for plan in plans]}


def _summarise(
    peaks: Sequence[int], measured: Sequence[dict[str, float]], predicted: dict[str, Any]
) -> dict[str, Any]:
    steps = [one["step_s"] for one in measured]
    ratios = [guess / step for guess, step in zip(predicted["step_s"], steps, strict=True)]
    return {
        "peak_nbytes": statistics.median(peaks),
        "predicted_peak_nbytes": predicted["peak_nbytes"],
        "memory_predicted_over_measured": predicted["peak_nbytes"] / statistics.median(peaks),
        "step_s": spread(steps),
        "predicted_step_s": spread(predicted["step_s"]),
        "time_predicted_over_measured": spread(ratios),
    }


def _ops_backend() -> str:
    from shardgrad import ops

    return ops.backend()


def _print(record: dict[str, Any]) -> None:
    config, summary = record["config"], record["summary"]
    table = Table("", "measured", "predicted", "predicted / measured", "quartiles")
    table.title = (
        f"{config['preset']}, {config['precision']}, {config['ranks']} ranks, stage {config['stage']}, "
        f"{config['accumulate']} x {config['batch_size']} x {config['seq_len']} tokens"
    )
    table.add_row(
        "peak memory, MiB",
        f"{summary['peak_nbytes'] / _MIB:.1f}",
        f"{summary['predicted_peak_nbytes'] / _MIB:.1f}",
        f"{summary['memory_predicted_over_measured']:.3f}",
        "",
    )
    ratio = summary["time_predicted_over_measured"]
    table.add_row(
        "step, ms",
        f"{summary['step_s']['median'] * 1e3:.1f}",
        f"{summary['predicted_step_s']['median'] * 1e3:.1f}",
        f"{ratio['median']:.3f}",
        f"{ratio['quartiles'][0]:.3f} to {ratio['quartiles'][1]:.3f}",
    )
    show(table)


if __name__ == "__main__":
    main()
