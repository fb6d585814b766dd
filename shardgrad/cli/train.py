"""`shardgrad train`: options, generated from the fields of `TrainConfig`, and the last sentence."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from shardgrad.training.config import TrainConfig, read_settings
from shardgrad.training.failure import TrainingError, UsageError
from shardgrad.training.presets import Scalar

_NEWEST = ""  # what a bare --resume stands for


def _options_of_a_run(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of `TrainConfig`; None means that it was not given."""
    kinds = typing.get_type_hints(TrainConfig)
    for one in reversed(dataclasses.fields(TrainConfig)):
        command = _option(one, kinds[one.name])(command)
    return command


def _option(one: dataclasses.Field[Any], kind: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    flag = "--" + one.name.replace("_", "-")
    words = one.metadata["help"]
    if (
        one.default is not None
        and one.default is not dataclasses.MISSING
        and not isinstance(one.default, bool)
    ):
        words += f"  [default: {one.default}]"
    if kind is bool:
        declaration = f"--no-{flag[2:]}" if one.default else flag
        return click.option(declaration, one.name, flag_value=not one.default, default=None, help=words)
    if typing.get_origin(kind) is dict:
        return click.option(flag, one.name, multiple=True, metavar="KEY=VALUE", help=words)
    choices = one.metadata["choices"]
    plain = next((part for part in typing.get_args(kind) if part is not type(None)), kind)
    # Words, not click.Choice: TrainConfig refuses others, wherever they come from, in one way.
    metavar = "|".join(choices) if choices else None
    return click.option(flag, one.name, type=plain, default=None, metavar=metavar, help=words)


@click.command(short_help="Train a language model on bytes.")
@_options_of_a_run
@click.option(
    "--resume",
    is_flag=False,
    flag_value=_NEWEST,
    default=None,
    metavar="[RUN_DIR]",
    help="Go on with a run, exactly, also on another number of ranks.  [RUN_DIR: the newest in runs/]",
)
@click.option(
    "--config", "file", type=click.Path(path_type=Path), help="Read settings from TOML or JSON; flags win."
)
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
def train(resume: str | None, file: Path | None, debug: bool, **flags: Any) -> None:
    """Train a byte-level language model, by default on the source of Python's standard library.

    Starts its own ranks (--ranks, --mesh), or is started by torchrun:
    torchrun --nproc-per-node 2 -m shardgrad.cli train.
    Ctrl-C finishes the step and saves; once more stops at once.
    """
    from shardgrad.checkpoint.text import escaped
    from shardgrad.training.launch import newest_run, start, torchrun_world_size

    try:
        given = read_settings(file) if file is not None else {}
        given |= {name: value for name, value in flags.items() if value not in (None, ())}
        if flags["override"]:
            given["override"] = dict(key_and_value(text) for text in flags["override"])
        folder = None if resume is None else newest_run() if resume == _NEWEST else Path(resume)
        report = start(given, resume=folder, debug=debug)
    except TrainingError as error:
        click.echo(f"shardgrad train: {escaped(error)}", err=True)
        sys.exit(error.exit_status)
    if report.exit_status and report.speaks:
        click.echo(f"shardgrad train: {escaped(report.sentence)}", err=True)
        for frame in report.stack:
            click.echo(f"  {escaped(frame)}", err=True)
    if torchrun_world_size() is not None:
        # Not sys.exit: after a failure, the backends' threads may wait for ranks that are gone; and a thread
        # that comes back from a store while the interpreter ends aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(report.exit_status)
    sys.exit(report.exit_status)


def key_and_value(text: str) -> tuple[str, Scalar]:
    """`layers=2` to ("layers", 2); what is not a number or true/false is text."""
    key, sign, value = text.partition("=")
    if not (key and sign and value):
        raise UsageError(f"--override {text} is not KEY=VALUE: write, for example, --override layers=2.")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = value
    return key, parsed if isinstance(parsed, bool | int | float) else value
