"""`shardgrad completion`: words of the command line, completed by the shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from shardgrad.cli.command import Command


@click.command(
    cls=Command,
    examples=[
        'eval "$(shardgrad completion bash)"     # in ~/.bashrc',
        'eval "$(shardgrad completion zsh)"      # in ~/.zshrc',
        "shardgrad completion fish > ~/.config/fish/completions/shardgrad.fish",
    ],
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options and their values in SHELL."""
    from shardgrad.cli import main

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"this click does not know {shell}: pip install --upgrade click")
    click.echo(kind(main, {}, "shardgrad", "_SHARDGRAD_COMPLETE").source())
