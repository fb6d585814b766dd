"""The command line. PyTorch is imported when a command runs.

So `shardgrad --help`, `shardgrad train --help` and errors in options are answered in a fraction of
a second.
"""

from __future__ import annotations

from typing import Any

import click

from shardgrad.programs.cli.checkpoint import checkpoint
from shardgrad.programs.cli.doctor import doctor
from shardgrad.programs.cli.plan import plan
from shardgrad.programs.cli.reporting import reported
from shardgrad.programs.cli.train import train


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from shardgrad.version import described

        click.echo(f"shardgrad {described()}")
        ctx.exit()


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command, and reports what ends it before it has begun."""
        with reported(ctx.command_path):
            return super().invoke(ctx)


@click.group(
    name="shardgrad",
    cls=_Group,
    commands=[doctor, plan, train, checkpoint],
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
