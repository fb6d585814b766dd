"""`shardgrad explain`: where a step's time goes, and what changes would save."""

from __future__ import annotations

import json
from pathlib import Path

import click

from shardgrad.cli.command import Command
from shardgrad.train.failure import UsageError


@click.command(
    cls=Command,
    examples=[
        "shardgrad train --steps 20 --profile 15 --run-dir runs/profiled; shardgrad explain "
        "runs/profiled",
        "shardgrad explain trace.json.gz --perfetto replayed.json",
        "shardgrad plan --preset 8b --ranks 64 --trace plan.json; shardgrad explain plan.json",
    ],
)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the replayed step into this file, for https://ui.perfetto.dev.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def explain(path: Path, perfetto: Path | None, is_json: bool) -> None:
    """Say where a step's time goes, and what changes would save.

    PATH is a run folder with a trace.json (shardgrad train --profile STEP), or a Chrome trace of
    torch.profiler. The step is replayed from its operations and what each waits for; then changes
    are made to them, and it is replayed again. docs/how_to/explain_a_step.md says how far to trust
    that.
    """
    from rich.console import Console

    from shardgrad.explain import report
    from shardgrad.explain.changes import savings
    from shardgrad.explain.replay import replay
    from shardgrad.explain.traces import read_trace, write_trace

    step = read_trace(_trace_in(path))
    played = replay(step.ops)
    found = savings(step.ops)
    if perfetto is not None:
        write_trace(step, played, perfetto)
    if is_json:
        click.echo(json.dumps(report.as_json(step, played, found)))
        return
    console = Console(highlight=False)
    report.show(
        step, played, found, console if console.is_terminal else Console(highlight=False, width=100)
    )


def _trace_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in ("trace.json", "trace.json.gz"):
        if (path / name).is_file():
            return path / name
    raise UsageError(
        f"{path} has no trace.json: profile a step with shardgrad train --profile STEP, or give a "
        f"trace."
    )
