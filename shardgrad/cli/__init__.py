"""The command line. Each subcommand imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import click

from shardgrad.cli.bench import bench
from shardgrad.cli.checkpoint import checkpoint
from shardgrad.cli.doctor import doctor
from shardgrad.cli.drill import drill
from shardgrad.cli.plan import plan
from shardgrad.cli.train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Fully-sharded data-parallel training with PyTorch."""


main.add_command(bench)
main.add_command(checkpoint)
main.add_command(doctor)
main.add_command(drill)
main.add_command(plan)
main.add_command(train)
