"""The command line. PyTorch is imported when a command runs.

So `shardgrad --help`, `shardgrad train --help` and errors in options are answered in a fraction of
a second.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from shardgrad.programs.cli.checkpoint import checkpoint
from shardgrad.programs.cli.doctor import doctor
from shardgrad.programs.cli.plan import plan
from shardgrad.programs.cli.reporting import report
from shardgrad.programs.cli.train import train


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from shardgrad.version import described

        click.echo(f"shardgrad {described()}")
        ctx.exit()


class _Program(click.Group):
    def main(self, *args: Any, **options: Any) -> Any:
        """Runs a command and exits. Every error is a message on standard error."""
        try:
            status = super().main(*args, **{**options, "standalone_mode": False})
        except click.ClickException as error:
            error.show()
            status = error.exit_code
        except Exception as error:
            status = report(error)
        sys.exit(status)


@click.group(
    name="shardgrad",
    cls=_Program,
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
