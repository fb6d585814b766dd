"""`shardgrad train`: options generated from the fields of `TrainConfig`, and the final report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.settings import given_for, options_of


@click.command(
    short_help="Train a language model on bytes.",
    epilog="""\b
Examples:
  shardgrad train
  shardgrad train --preset small --data my_text --steps 2000 --ranks 4
  shardgrad train --precision bf16-mixed --activation-checkpointing
  shardgrad train --resume runs/NAME --ranks 4""",
    params=options_of(TrainConfig),
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="RUN_DIR",
    help="Resume the run in this folder from its newest checkpoint; the number of ranks may "
    "differ.",
)
def train(resume: Path | None, **flags: Any) -> None:
    """Train a byte-level language model, by default on the source of Python's standard library.

    Starts its own ranks (--ranks), on one machine.
    Ctrl-C finishes the current step and saves a checkpoint; a second Ctrl-C stops at once.
    """
    from shardgrad.programs.train.launch import launch_ranks, prepare

    config = prepare(given_for(TrainConfig, flags), resume=resume)
    sys.exit(launch_ranks(config, resume=resume is not None))
