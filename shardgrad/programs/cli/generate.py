"""`shardgrad generate`: text from a trained model."""

from __future__ import annotations

import math
import os
from pathlib import Path

import click

from shardgrad.programs.cli.command import Command
from shardgrad.programs.train.config import TrainConfig, read_settings
from shardgrad.programs.train.failure import UsageError


@click.command(
    cls=Command,
    examples=[
        "shardgrad generate runs/first",
        "shardgrad generate runs/first --prompt 'def main(' --bytes 400 --temperature 0.5",
    ],
)
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompt", default="\n", help="Text to continue.  [default: a new line]")
@click.option(
    "--bytes",
    "count",
    type=click.IntRange(1, 2**20),
    default=200,
    show_default=True,
    help="Number of bytes to add.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    default=0.8,
    show_default=True,
    help="Lower is more predictable; 0 takes the most likely byte.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Seed of the choice.",
)
def generate(run: Path, prompt: str, count: int, temperature: float, seed: int) -> None:
    """Continue a text with the model of a run.

    Loads the newest checkpoint of the folder RUN into one process, on the CPU.
    """
    if not prompt:
        raise UsageError("--prompt is empty: give at least one character.")
    if math.isnan(temperature):
        raise UsageError("--temperature nan is not in the range from 0 to 100.")
    if not (run / "config.json").exists():
        raise UsageError(f"There is no run in {run} (no config.json): correct the folder.")
    # Looked for first without PyTorch, whose import takes seconds.
    TrainConfig(**read_settings(run / "config.json"))
    if not any(run.glob("checkpoints/*")):
        raise UsageError(f"{run} has no checkpoint yet: train until the first one.")
    import torch

    from shardgrad.programs.train.generate import continued, load_run, shown

    model, config = load_run(run)
    begin = os.fsencode(prompt)  # the bytes that were typed, whether they are UTF-8 or not
    text = continued(
        model,
        begin,
        count=count,
        window=min(config.seq_len, len(begin) + count),
        temperature=temperature,
        seed=seed,
        device=torch.device("cpu"),
    )
    click.echo(shown(text))
