"""`shardgrad bench`: options, and which of their combinations are measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardgrad.bench.catalogue import BASE, CATALOGUE, DEFAULT
from shardgrad.bench.shapes import SHAPES
from shardgrad.bench.task import PRECISIONS, Length, Task, smoke
from shardgrad.train.failure import TrainingError, UsageError
from shardgrad.train.presets import suggestion

if TYPE_CHECKING:
    from rich.console import Console

_ALL = "all"


@click.command(short_help="Measure training steps of several engines side by side.")
@click.option(
    "--preset",
    "presets",
    multiple=True,
    metavar="|".join(SHAPES),
    help="Model.  [default: tiny]; repeatable.",
)
@click.option(
    "--hf", "hf", multiple=True, help="A Hugging Face causal LM: a config.json, or a model type; repeatable."
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    metavar="|".join(PRECISIONS),
    help="Of forward and backward.  [default: fp32]; repeatable.",
)
@click.option("--ranks", type=click.IntRange(1), multiple=True, help="Processes.  [default: 2]; repeatable.")
@click.option("--mesh", help="2x2: HSDP, 2 replicas of 2 shards.  [default: shard over all ranks]")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="NAME",
    help=f"Contestant, or {_ALL}; repeatable; --list-engines names them.  [default: {', '.join(DEFAULT)}]",
)
@click.option(
    "--accumulate", type=click.IntRange(1), default=1, show_default=True, help="Micro-batches per step."
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Sequences per rank and micro-batch.",
)
@click.option(
    "--seq-len", type=click.IntRange(2), default=128, show_default=True, help="Tokens per sequence."
)
@click.option(
    "--clip", type=click.FloatRange(0), default=0.0, show_default=True, help="Gradient norm; 0 does not clip."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--share-device", is_flag=True, help="Put all ranks on one GPU, to see that it works.")
@click.option(
    "--rounds", type=click.IntRange(2), default=40, show_default=True, help="Turns of each contestant."
)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Of a turn.")
@click.option(
    "--warmup", type=click.IntRange(5), default=8, show_default=True, help="Steps before the first round."
)
@click.option(
    "--limit-s", type=float, default=3600.0, show_default=True, help="Fewer rounds rather than longer."
)
@click.option(
    "--timeout",
    "answer_s",
    type=float,
    default=120.0,
    show_default=True,
    help="Seconds until ranks count as hung.",
)
@click.option(
    "--keep-heap/--no-keep-heap", default=True, show_default=True, help="The trainer's heap setting."
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder.  [default: runs/bench-<time>]"
)
@click.option(
    "--show",
    "records",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="Measure nothing: show these records, and write the report of them; repeatable.",
)
@click.option("--list-engines", is_flag=True, help="Say who can take part, and leave.")
@click.option(
    "--smoke", "is_smoke", is_flag=True, help="Seconds, to see that it runs; the numbers mean nothing."
)
def bench(
    presets: Sequence[str],
    hf: Sequence[str],
    precisions: Sequence[str],
    ranks: Sequence[int],
    engines: Sequence[str],
    device: str,
    out: Path | None,
    records: Sequence[Path],
    list_engines: bool,
    is_smoke: bool,
    rounds: int,
    steps: int,
    warmup: int,
    limit_s: float,
    answer_s: float,
    **common: Any,
) -> None:
    """Measure training steps of several engines, interleaved round by round, each in processes of its own.

    Writes bench.jsonl, report.html (one file, no network) and, with matplotlib, pictures. A contestant that
    is not installed, cannot do the task, crashes or hangs is a row with the reason; the others go on. The
    exit status is 1 if nothing was measured, or if an engine did not compute what fsdp2 computes.
    How to read it: docs/how_to/benchmark.md.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if list_engines:
        for name, entry in CATALOGUE.items():
            console.print(f"{name:18} {entry.words}", markup=False, soft_wrap=True)
        return
    folder = out or Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S")
    length = Length(rounds, steps, warmup, limit_s, answer_s)
    try:
        names = _names(engines)
        found = _read(records)
        if not records:
            models: list[dict[str, Any]] = [{"preset": one} for one in presets] + [{"hf": one} for one in hf]
            for model, precision, world in product(
                models or [{}], precisions or ["fp32"], ranks or [_ranks(common["mesh"])]
            ):
                task = Task(**model, precision=precision, ranks=world, device=_device(device), **common)
                found.append(_measure(task, length, names, folder, is_smoke, console))
    except TrainingError as error:
        click.echo(f"shardgrad bench: {error}", err=True)
        sys.exit(error.exit_status)
    _finish(found, folder, console, measured=not records)


def _measure(
    task: Task, length: Length, names: Sequence[str], folder: Path, is_smoke: bool, console: Console
) -> dict[str, Any]:
    from shardgrad.bench.record import append
    from shardgrad.bench.run import measure
    from shardgrad.bench.table import show

    if is_smoke:
        task, length = smoke(task, length)
    with console.status("starting") as status:
        record = measure(task, length, names, folder / "logs", lambda words: status.update(words))
    append(folder, record)
    show(record, console)
    return record


def _finish(records: list[dict[str, Any]], folder: Path, console: Console, *, measured: bool) -> None:
    from shardgrad.bench.picture import draw
    from shardgrad.bench.report import write
    from shardgrad.bench.table import show

    if not measured:
        for record in records:
            show(record, console)
    paths = [write(records, folder / "report.html"), *draw(records, folder)]
    console.print(f"\n{', '.join(map(str, paths))}", markup=False, soft_wrap=True)
    if any(record["disagreed"] for record in records) or not any(record["summary"] for record in records):
        sys.exit(1)


def _names(engines: Sequence[str]) -> list[str]:
    """The contestants in the order of the catalogue, the base among them whoever is asked for."""
    for name in engines:
        if name != _ALL and name not in CATALOGUE:
            raise UsageError(f"There is no engine {name!r}: {suggestion(name, list(CATALOGUE))}")
    wanted = {*(engines or DEFAULT), BASE}
    return [name for name in CATALOGUE if name in wanted or _ALL in wanted]


def _ranks(mesh: str | None) -> int:
    from math import prod

    from shardgrad.train.config import mesh_shape

    return prod(mesh_shape(mesh)) if mesh else 2


def _device(wish: str) -> str:
    if wish != "auto":
        return wish
    # Asking costs the import of torch, which the parent needs for nothing else.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    import json

    from shardgrad.bench.run import BENCHMARK

    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UsageError(
                    f"{path}, line {number} is not JSON ({error}): give records of bench."
                ) from error
            if not isinstance(record, dict) or record.get("benchmark") != BENCHMARK:
                raise UsageError(
                    f"{path}, line {number} is not a record of shardgrad bench: leave the file out."
                )
            found.append(record)
    return found
