"""`shardgrad explain`: the communication of a profiled step that is exposed."""

from __future__ import annotations

import json
from pathlib import Path

import click

from shardgrad.programs.cli.command import Command
from shardgrad.programs.train.failure import UsageError


@click.command(
    cls=Command,
    examples=[
        "shardgrad train --steps 20 --profile 15 --run-dir runs/profiled; shardgrad explain "
        "runs/profiled",
        "shardgrad explain trace.json.gz --json",
    ],
)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
def explain(path: Path, is_json: bool) -> None:
    """Print how much communication of a step is exposed, and what compute waits for.

    PATH is a run folder with a trace.json (shardgrad train --profile STEP), or a Chrome trace of
    torch.profiler.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from shardgrad.programs.explain import explain as explained
    from shardgrad.programs.explain import read_trace

    found = explained(read_trace(_trace_in(path)))
    if is_json:
        click.echo(json.dumps(found.as_json()))
        return
    table = Table("", "time", "of the step", box=None, pad_edge=False)

    def add(name: str, seconds: float) -> None:
        printable = "".join(c if c.isprintable() else "?" for c in name)
        name = printable if len(printable) <= 60 else printable[:57] + "..."
        share = f"{seconds / found.step_s:.1%}" if found.step_s else ""
        table.add_row(escape(name), f"{seconds * 1e3:,.2f} ms", share)

    add("step", found.step_s)
    add("compute stream busy", found.compute_s)
    add("communication", found.communication_s)
    add("exposed communication", found.exposed_s)
    for kind, seconds in found.waits_s.items():
        add(f"compute waits for: {kind}", seconds)
    for name, seconds in found.largest_s.items():
        add(name, seconds)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=100)).print(table)


def _trace_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in ("trace.json", "trace.json.gz"):
        if (path / name).is_file():
            return path / name
    raise UsageError(
        f"{path} has no trace.json: profile a step with shardgrad train --profile STEP, or give a "
        "trace."
    )
