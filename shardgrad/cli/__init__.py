"""The command line. A subcommand is imported when it is used, and PyTorch only when it runs.

So `shardgrad --help`, `shardgrad train --help` and errors in options are answered in a fraction of a second.
"""

from __future__ import annotations

from importlib import import_module

import click

__all__ = ["main"]

# By name: the module whose attribute of the same name is the command, and its line in `shardgrad --help`.
_COMMANDS = {
    "bench": ("shardgrad.cli.bench", "Moved: python -m benchmarks, in a checkout of the repository."),
    "checkpoint": ("shardgrad.cli.checkpoint", "Verify, inspect and convert checkpoints."),
    "doctor": ("shardgrad.cli.doctor", "Print versions and devices; check that a step can be captured."),
    "plan": ("shardgrad.cli.plan", "Predict memory, traffic and time of a training step."),
    "train": ("shardgrad.cli.train", "Train a language model on bytes."),
}


class _LazyGroup(click.Group):
    """A group that imports a subcommand when it is named; `--help` needs none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(_COMMANDS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Fully-sharded data-parallel training with PyTorch."""
