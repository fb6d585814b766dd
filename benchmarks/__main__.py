"""`python -m benchmarks [NAME ...]`: every measured claim about shardgrad, runnable.

python -m benchmarks --help                  what there is
python -m benchmarks                         training steps of several engines side by side
python -m benchmarks kernels reading         others, one after the other
python -m benchmarks all --smoke             all, in seconds each, to see that they run
python -m benchmarks training_step --preset small --ranks 4    with options; NAME --help lists them
torchrun --nnodes 2 ... -m benchmarks training_step            on several machines; srun too
"""

from __future__ import annotations

import os
import sys
import time
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

from benchmarks.launched import launch_of, launched
from benchmarks.run import Run

DEFAULT = "training_step"

# By the name of its module: the question that it answers.
BENCHMARKS = {
    "training_step": "How long does a step take with each engine, with how much memory and "
    "traffic?",
    "counts": "What does a step launch, send, wait for, allocate and hold? Needs `.venv-cuda`, and "
    "no GPU.",
    "scale": "What does a rank cost its host in worlds of 8 to 16,384 ranks? Needs `.venv-cuda`, "
    "and no GPU.",
    "reading": "What does a reader hold: size, imports, calls and files of a step, private names?",
    "kernels": "How near to a plain copy of as many bytes are the ops?",
    "send_weights": "How long does a sync of weights to a tensor-parallel receiver take?",
}
_RECORDS = {
    "report": "Measure nothing: print records, and write the page of them.",
    "readme": "Measure nothing: write the tables of benchmarks/README.md from the records.",
}


class _Group(click.Group):
    """Imports a benchmark when it is named; takes `--smoke` and `--out` wherever they stand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*BENCHMARKS, *_RECORDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = resolve_name(f"benchmarks.{cmd_name}:main")
        command.name = cmd_name
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Names"):
            formatter.write_dl([*BENCHMARKS.items(), *_RECORDS.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = iter(args)
        ours: list[str] = []
        theirs: list[str] = []
        for word in words:
            if word == "--out":
                ours += [word, *islice(words, 1)]
            else:
                (ours if word == "--smoke" or word.startswith("--out=") else theirs).append(word)
        if theirs[:1] == ["all"]:
            theirs[:1] = BENCHMARKS
        refused = {*theirs} & {*BENCHMARKS} - {DEFAULT}
        if refused and "RANK" in os.environ:
            ctx.fail(f"{min(refused)} starts its own ranks: only {DEFAULT} takes those of torchrun")
        return super().parse_args(ctx, [*ours, *(theirs or [DEFAULT])])


@click.group(cls=_Group, chain=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--smoke",
    is_flag=True,
    help="A few seconds each, to see that they run; the numbers mean nothing.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of records and report.  [default: runs/bench-<time>; with --smoke: nothing is "
    "written]",
)
@click.pass_context
def main(ctx: click.Context, smoke: bool, out: Path | None) -> None:
    """Measure claims about shardgrad. Several names are measured one after the other, `all` is
    every one; without a name it is training_step. `NAME --help` lists a benchmark's options. How to
    read the results: docs/how_to/benchmark.md.
    """
    try:
        launch = launch_of(os.environ)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    on = None
    if launch is not None:
        on = ctx.with_resource(launched(launch))
        if on is None:
            sys.exit(0)  # the first process measures, and is done
    if out is None and not smoke:
        out = Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S")
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{out} cannot be made ({error.strerror}): choose another folder"
        raise click.BadParameter(reason, param_hint="--out") from error
    ctx.obj = Run(smoke=smoke, out=out, on=on)


@main.result_callback()
@click.pass_obj
def finish(run: Run, _: Any, **options: Any) -> None:
    """Write the report of what was measured."""
    path = run.close()
    if path is not None:
        click.echo(path)
    sys.exit(1 if run.has_failed else 0)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
