"""Training steps of several engines, interleaved round by round, each in processes of its own.

A record has, beyond what every record has: `left_out`, why each of the other engines has no
numbers; `disagreed`, those of them that do not compute what fsdp2 computes; and `unobserved`, why
engines that have times have nothing else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import click

from benchmarks.engines.catalogue import BASE, DEFAULT, ENGINES
from benchmarks.engines.comparison import Outcome, compare
from benchmarks.engines.summary import record_of
from benchmarks.engines.task import PRECISIONS, Length, Task, check, smoke
from benchmarks.run import Run, option
from shardgrad.programs.plan.request import mesh_shape
from shardgrad.programs.train.failure import TrainingError, UsageError
from shardgrad.programs.train.presets import PRESETS

_ALL = "all"


@click.command()
@option(
    "--preset",
    "presets",
    multiple=True,
    type=click.Choice(list(PRESETS)),
    help="Model; repeatable.  [default: tiny]",
)
@option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(PRECISIONS),
    help="Data type of forward and backward; repeatable.  [default: fp32]",
)
@option(
    "--ranks",
    type=click.IntRange(1),
    multiple=True,
    help="Processes; repeatable.  [default: 2, or those that torchrun started]",
)
@option("--mesh", help="2x2: HSDP, 2 replicas of 2 shards.  [default: shard over all ranks]")
@option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice([*ENGINES, _ALL]),
    metavar="NAME",
    help=f"Engine, or {_ALL}; repeatable; --list-engines names them.  [default: "
    f"{', '.join(DEFAULT)}]",
)
@option("--accumulate", type=click.IntRange(1), default=1, help="Micro-batches per step.")
@option(
    "--batch-size", type=click.IntRange(1), default=8, help="Sequences per rank and micro-batch."
)
@option("--seq-len", type=click.IntRange(2), default=128, help="Tokens per sequence.")
@option(
    "--clip", type=click.FloatRange(0), default=0.0, help="Largest gradient norm; 0 does not clip."
)
@option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Where ranks compute.",
)
@option("--share-device", is_flag=True, help="Put all ranks on one GPU, to see that it works.")
@option("--rounds", type=click.IntRange(2), default=40, help="Turns of each engine.")
@option("--steps", type=click.IntRange(1), default=5, help="Steps in a turn.")
@option("--warmup", type=click.IntRange(5), default=8, help="Steps before the first round.")
@option(
    "--limit-s",
    type=float,
    default=3600.0,
    help="Measure fewer rounds rather than for more seconds.",
)
@option(
    "--timeout",
    "answer_s",
    type=click.FloatRange(1),
    default=120.0,
    help="Seconds without an answer until ranks count as hung.",
)
@option("--list-engines", is_flag=True, help="List the engines, and exit.")
@click.pass_obj
def main(
    run: Run,
    presets: Sequence[str],
    precisions: Sequence[str],
    ranks: Sequence[int],
    engines: Sequence[str],
    device: str,
    list_engines: bool,
    rounds: int,
    steps: int,
    warmup: int,
    limit_s: float,
    answer_s: float,
    **common: Any,
) -> None:
    """Measure training steps of several engines, interleaved round by round, each in processes of
    its own.

    An engine that is not installed, cannot do the task, crashes or hangs is a row with the reason;
    the others go on. The exit status is 1 if nothing was measured, or if an engine did not compute
    what fsdp2 computes.
    """
    if list_engines:
        for name, engine in ENGINES.items():
            click.echo(f"{name:18} {engine.words}")
        return
    length = Length(rounds, steps, warmup, limit_s, answer_s)
    try:
        names = _names(engines)
        worlds, hosts = ranks or [prod(mesh_shape(common["mesh"])) if common["mesh"] else 2], 1
        if run.on is not None:
            started, hosts = run.on.launch.world_size, run.on.launch.hosts
            if {*ranks} - {started}:
                raise UsageError(f"{started} ranks were started: leave out --ranks")
            worlds = [started]
        tasks = [
            Task(
                preset,
                precision=precision,
                ranks=world,
                hosts=hosts,
                device=_device(device),
                **common,
            )
            for preset, precision, world in product(
                presets or ["tiny"], precisions or ["fp32"], worlds
            )
        ]
    except TrainingError as error:
        raise click.UsageError(str(error)) from error
    records = [_measure(task, length, names, run) for task in tasks]
    run.has_failed |= any(one["disagreed"] for one in records) or not any(
        one["summary"] for one in records
    )


def _measure(task: Task, length: Length, names: Sequence[str], run: Run) -> dict[str, Any]:
    from rich.console import Console

    if run.smoke:
        task, length = smoke(task, length)
    environment = run.environment
    with Console().status("starting") as status, tempfile.TemporaryDirectory() as unkept:
        logs = run.out / "logs" if run.out is not None else Path(unkept)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            check(task)
            outcome = compare(
                task, length, names, logs, lambda words: status.update(words), on=run.on
            )
        except UsageError as refusal:
            outcome = Outcome(left_out=dict.fromkeys(names, str(refusal)))
    record = record_of(task, length, names, outcome, environment)
    run.add(record)
    return record


def _names(engines: Sequence[str]) -> list[str]:
    """The engines in the order of the catalogue, the base always among them."""
    wanted = {*(engines or DEFAULT), BASE}
    return [name for name in ENGINES if name in wanted or _ALL in wanted]


def _device(wish: str) -> str:
    if wish != "auto":
        return wish
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
