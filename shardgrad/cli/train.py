"""`shardgrad train`: options generated from the fields of `TrainConfig`, and the final report."""

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

from shardgrad.cli.reporting import escaped, reported
from shardgrad.train.config import TrainConfig, read_settings
from shardgrad.train.failure import UsageError
from shardgrad.train.presets import Scalar

_NEWEST = ""  # the value of --resume without a folder


def _options_of_a_run(command: Callable[..., None]) -> Callable[..., None]:
    """Adds one option to a command for each field of `TrainConfig`; None means that it was not given."""
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
    # Not click.Choice: TrainConfig checks values from the command line and from files in one place.
    metavar = "|".join(choices) if choices else None
    return click.option(flag, one.name, type=plain, default=None, metavar=metavar, help=words)


@click.command()
@_options_of_a_run
@click.option(
    "--resume",
    is_flag=False,
    flag_value=_NEWEST,
    default=None,
    metavar="[RUN_DIR]",
    help="Resume the run in this folder from its newest checkpoint; the number of ranks may differ.  "
    "[without RUN_DIR: the newest run in runs/]",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="Read settings from a TOML or JSON file; options on the command line take precedence.",
)
@click.option("--debug", is_flag=True, help="Print the traceback of a failure.")
def train(resume: str | None, file: Path | None, debug: bool, **flags: Any) -> None:
    """Train a byte-level language model, by default on the source of Python's standard library.

    Starts its own ranks (--ranks, --mesh), or runs as one of the ranks that torchrun started:
    torchrun --nproc-per-node 2 -m shardgrad train.
    Ctrl-C finishes the current step and saves a checkpoint; a second Ctrl-C stops at once.
    """
    from shardgrad.train.launch import newest_run, start
    from shardgrad.train.launcher import torchrun_world_size

    with reported("shardgrad train"):
        given = read_settings(file) if file is not None else {}
        given |= {name: value for name, value in flags.items() if value not in (None, ())}
        if flags["override"]:
            given["override"] = dict(key_and_value(text) for text in flags["override"])
        folder = None if resume is None else newest_run() if resume == _NEWEST else Path(resume)
        report = start(given, resume=folder, debug=debug)
    if report.exit_status and report.speaks:
        click.echo(f"shardgrad train: {escaped(report.sentence)}", err=True)
        for frame in report.stack:
            click.echo(f"  {escaped(frame)}", err=True)
    if torchrun_world_size() is not None:
        # Not sys.exit: after a failure the backends' threads may wait for ranks that have ended, and a thread
        # that returns from a store while the interpreter shuts down aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(report.exit_status)
    sys.exit(report.exit_status)


def key_and_value(text: str) -> tuple[str, Scalar]:
    """Parses `layers=2` into ("layers", 2); a value that is not a number or true/false is text."""
    key, sign, value = text.partition("=")
    if not (key and sign and value):
        raise UsageError(f"--override {text} is not KEY=VALUE: write, for example, --override layers=2.")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = value
    return key, parsed if isinstance(parsed, bool | int | float) else value
