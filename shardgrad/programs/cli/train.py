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

from shardgrad.programs.cli.command import Command, is_debug
from shardgrad.programs.cli.reporting import escaped
from shardgrad.programs.train.config import TrainConfig, read_settings
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.presets import Scalar

_NEWEST = ""  # the value of --resume without a folder

_SECTIONS = {
    "Model and data": (
        "preset",
        "hf",
        "override",
        "data",
        "data_limit_mib",
        "validation_fraction",
        "seed",
    ),
    "Ranks and engine": (
        "ranks",
        "mesh",
        "device",
        "engine",
        "stage",
        "precision",
        "activation_checkpointing",
        "compile",
        "graph",
        "timeout",
    ),
    "Steps": ("steps", "batch_size", "accumulate", "sync_every_microbatch", "seq_len"),
    "Optimizer": ("optimizer", "lr", "warmup_steps", "final_lr_ratio", "weight_decay", "clip"),
    "Metrics and checks": (
        "log_every",
        "eval_every",
        "eval_samples",
        "profile",
        "tensorboard",
        "sample_bytes",
        "plot",
    ),
    "Run folder and checkpoints": (
        "run_dir",
        "checkpoint_every",
        "checkpoint_async",
        "keep",
        "resume",
    ),
    "Settings": ("config_file", "print_config"),
}
_EXAMPLES = [
    "shardgrad train",
    "shardgrad train --preset small --data my_texts/ --steps 2000 --ranks 4",
    "shardgrad train --mesh 2x2 --precision bf16-mixed --activation-checkpointing",
    "shardgrad train --resume",
    "shardgrad train --lr 1e-3 --print-config > run.json; shardgrad train --config run.json",
    "torchrun --nproc-per-node 2 -m shardgrad train",
]


def _options_of_a_run(command: Callable[..., None]) -> Callable[..., None]:
    """Adds one option to a command for each field of `TrainConfig`; None means that it was not
    given.
    """
    kinds = typing.get_type_hints(TrainConfig)
    for one in reversed(dataclasses.fields(TrainConfig)):
        command = _option(one, kinds[one.name])(command)
    return command


def _option(
    one: dataclasses.Field[Any], kind: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
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
        return click.option(
            declaration, one.name, flag_value=not one.default, default=None, help=words
        )
    if typing.get_origin(kind) is dict:
        return click.option(flag, one.name, multiple=True, metavar="KEY=VALUE", help=words)
    choices = one.metadata["choices"]
    plain = next((part for part in typing.get_args(kind) if part is not type(None)), kind)
    # Not click.Choice: TrainConfig checks values from the command line and from files in one place.
    metavar = "|".join(choices) if choices else None

    def completed(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    bare: dict[str, Any] = {}
    if one.metadata["bare"] is not None:
        bare = {"is_flag": False, "flag_value": one.metadata["bare"]}
    return click.option(
        flag,
        one.name,
        type=plain,
        default=None,
        **bare,
        metavar=metavar,
        help=words,
        shell_complete=completed if choices else None,
    )


@click.command(cls=Command, sections=_SECTIONS, examples=_EXAMPLES)
@_options_of_a_run
@click.option(
    "--resume",
    is_flag=False,
    flag_value=_NEWEST,
    default=None,
    metavar="[RUN_DIR]",
    help="Resume the run in this folder from its newest checkpoint; the number of ranks may "
    "differ.  [without RUN_DIR: the newest run in runs/]",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Read settings from a TOML or JSON file; options on the command line take precedence.",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print all settings as JSON, in the form that --config reads, and start nothing.",
)
@click.pass_context
def train(
    ctx: click.Context,
    /,
    resume: str | None,
    config_file: Path | None,
    print_config: bool,
    **flags: Any,
) -> None:
    """Train a byte-level language model, by default on the source of Python's standard library.

    Starts its own ranks (--ranks, --mesh), or runs as one of the ranks that torchrun started.
    Ctrl-C finishes the current step and saves a checkpoint; a second Ctrl-C stops at once.
    """
    from shardgrad.programs.train.launch import newest_run, prepare, start
    from shardgrad.programs.train.launcher import torchrun_world_size

    if flags["preset"] is not None and flags["hf"] is not None:
        raise UsageError("--preset and --hf name a model each: give one.")
    given = read_settings(config_file) if config_file is not None else {}
    given |= {name: value for name, value in flags.items() if value not in (None, ())}
    if flags["override"]:
        given["override"] = dict(key_and_value(text) for text in flags["override"])
    folder = None if resume is None else newest_run() if resume == _NEWEST else Path(resume)
    job = prepare(given, resume=folder, debug=is_debug(ctx))
    if print_config:
        # The default folder has the time of day in its name.
        click.echo(
            dataclasses.replace(job.config, run_dir=given.get("run_dir")).to_json(), nl=False
        )
        return
    report = start(job)
    if report.exit_status and report.speaks:
        click.echo(f"shardgrad train: {escaped(report.sentence)}", err=True)
        for frame in report.stack:
            click.echo(f"  {escaped(frame)}", err=True)
    if torchrun_world_size() is not None:
        # Not sys.exit: after a failure the backends' threads may wait for ranks that have ended,
        # and a thread that returns from a store while the interpreter shuts down aborts the
        # process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(report.exit_status)
    sys.exit(report.exit_status)


def key_and_value(text: str) -> tuple[str, Scalar]:
    """Parses `layers=2` into ("layers", 2); a value that is not a number or true/false is text."""
    key, sign, value = text.partition("=")
    if not (key and sign and value):
        raise UsageError(
            f"--override {text} is not KEY=VALUE: write, for example, --override layers=2."
        )
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = value
    return key, parsed if isinstance(parsed, bool | int | float) else value
