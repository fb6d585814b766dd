"""`shardgrad train`: options generated from the fields of `TrainConfig`, and the final report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shardgrad.programs.cli.command import Command, is_debug
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.settings import given_for, options_of

_NEWEST = ""  # the value of --resume without a folder

_EXAMPLES = [
    "shardgrad train",
    "shardgrad train --preset small --data my_texts/ --steps 2000 --ranks 4",
    "shardgrad train --precision bf16-mixed --activation-checkpointing",
    "shardgrad train --resume",
]


@click.command(
    cls=Command,
    short_help="Train a language model on bytes.",
    examples=_EXAMPLES,
)
@options_of(TrainConfig)
@click.option(
    "--resume",
    is_flag=False,
    flag_value=_NEWEST,
    default=None,
    metavar="[RUN_DIR]",
    help="Resume the run in this folder from its newest checkpoint; the number of ranks may "
    "differ.  [without RUN_DIR: the newest run in runs/]",
)
@click.pass_context
def train(
    ctx: click.Context,
    /,
    resume: str | None,
    **flags: Any,
) -> None:
    """Train a byte-level language model, by default on the source of Python's standard library.

    Starts its own ranks (--ranks), on one machine.
    Ctrl-C finishes the current step and saves a checkpoint; a second Ctrl-C stops at once.
    """
    from shardgrad.programs.train.launch import launch_ranks, newest_run, prepare

    folder = None if resume is None else newest_run() if resume == _NEWEST else Path(resume)
    config = prepare(given_for(TrainConfig, flags), resume=folder)
    sys.exit(launch_ranks(config, resume=folder is not None, debug=is_debug(ctx)))
