"""The command line. A subcommand is imported when it is used, and PyTorch only when it runs.

So `shardgrad --help`, `shardgrad train --help` and errors in options are answered in a fraction of
a second.
"""

from __future__ import annotations

import click

from shardgrad.programs.cli.command import LazyGroup

# In the order of a run: before it, itself, after it.
_COMMANDS = {
    "doctor": "Print versions and devices; check a machine, or a program.",
    "plan": "Predict memory, traffic and time of a training step.",
    "train": "Train a language model on bytes.",
    "checkpoint": "Verify and export checkpoints.",
}


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from shardgrad.version import described

        click.echo(f"shardgrad {described()}")
        ctx.exit()


@click.group(
    name="shardgrad",
    cls=LazyGroup,
    lines=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n  shardgrad doctor\n  shardgrad plan --preset 8b --ranks 64\n"
    "  shardgrad train --steps 100\n\n`shardgrad COMMAND --help` has more of them.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and the commit.",
)
def main() -> None:
    """Fully-sharded data-parallel training with PyTorch."""
