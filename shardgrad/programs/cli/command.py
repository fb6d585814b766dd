"""The form of every command: options in sections, examples, and errors as one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from shardgrad.programs.cli.reporting import reported

_DEBUG = "shardgrad.debug"


class Command(click.Command):
    """A command whose expected errors are one sentence on standard error; `--debug` adds the
    traceback.

    Args:
        examples: command lines to show below the help.
        sections: titles, and the names of the parameters below each; other options come last.
        **rest: as for `click.Command`.
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        sections: Mapping[str, Sequence[str]] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(*args, **rest)
        self.sections = sections or {}
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

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, by sections."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        listed = {name for names in self.sections.values() for name in names}
        others = [name for name in records if name not in listed]
        for title, names in {
            **self.sections,
            "Other options" if listed else "Options": others,
        }.items():
            rows = [row for name in names if (row := records[name]) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def is_debug(ctx: click.Context) -> bool:
    """Returns whether `--debug` was given."""
    return bool(ctx.meta.get(_DEBUG))


def given(ctx: click.Context, *names: str) -> list[str]:
    """Returns the flags of those of some parameters that were on the command line."""
    flags = {param.name: param.opts[0] for param in ctx.command.params}
    return [
        flags[name]
        for name in names
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]


def _keep_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[_DEBUG] = value
