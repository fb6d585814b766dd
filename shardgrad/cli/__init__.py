"""The command line. Each subcommand imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import click

from shardgrad.cli.checkpoint import checkpoint
from shardgrad.cli.doctor import doctor
from shardgrad.cli.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Fully-sharded data-parallel training with PyTorch."""


main.add_command(checkpoint)
main.add_command(doctor)
main.add_command(train)
