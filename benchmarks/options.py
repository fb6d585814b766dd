"""Command-line options that every benchmark has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_RESULTS = Path(__file__).with_name("results")


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --smoke and --out; `out` is None where nothing is to be written."""
    command = click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        callback=_results_unless_smoke,
        help="Folder of the records.  [default: benchmarks/results; with --smoke: nothing is written]",
    )(command)
    # Eager, so that the default of --out can depend on it.
    return click.option(
        "--smoke",
        is_flag=True,
        is_eager=True,
        help="A few seconds, to see that it runs; the numbers mean nothing.",
    )(command)


def _results_unless_smoke(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    # Numbers that mean nothing do not go where results are kept, unless somebody asks.
    return value or (None if context.params["smoke"] else _RESULTS)


def heap_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --keep-heap."""
    return click.option(
        "--keep-heap/--no-keep-heap",
        default=True,
        show_default=True,
        help="The trainer's heap setting (shardgrad.train.heap), for every engine alike.",
    )(command)


def device_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --device."""
    return click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Who computes."
    )(command)
