"""The form of every command: examples, and errors as one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from shardgrad.programs.cli.reporting import reported

_DEBUG = "shardgrad.debug"


class Command(click.Command):
    """A command whose expected errors are one sentence on standard error; `--debug` adds the
    traceback.

    Args:
        examples: command lines to show below the help.
        **rest: as for `click.Command`.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.params.append(
            click.Option(
                ["--debug"],
                is_flag=True,
                expose_value=False,
                callback=_keep_debug,
                help="Print the traceback of an error.",
            )
        )
        if examples:
            self.epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples)])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, and reports its errors."""
        with reported(ctx.command_path, debug=is_debug(ctx)):
            return super().invoke(ctx)


def is_debug(ctx: click.Context) -> bool:
    """Returns whether `--debug` was given."""
    return bool(ctx.meta.get(_DEBUG))


def _keep_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[_DEBUG] = value
