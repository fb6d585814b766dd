"""How every command reports an error: one message on standard error, and the exit status."""

from __future__ import annotations

import os
import sys
import traceback

import click

from shardgrad.errors import OptionError, PartnerUnavailableError, ShardgradError
from shardgrad.programs.text import escaped
from shardgrad.programs.train.failure import Interrupted, TrainingError, UnexpectedError, explain


def report(error: Exception) -> int:
    """Prints a message, with the traceback of an error that no command expects.

    Returns:
        The exit status: 2 for a missing package and for an option with a wrong value, the error's
        own for a `TrainingError`, 130 for Ctrl-C, and 1 for other errors.
    """
    if not _flushed() and isinstance(error, OSError):
        error.filename = "standard output"  # which the system leaves out
    failure = _as_failure(error)
    before = traceback.format_exception(error) if isinstance(failure, UnexpectedError) else ()
    for line in "".join([*before, f"shardgrad: {failure}"]).split("\n"):
        click.echo(escaped(line), err=True)
    is_usage = isinstance(error, PartnerUnavailableError | ModuleNotFoundError | OptionError)
    return 2 if is_usage else failure.exit_status


def _as_failure(error: Exception) -> TrainingError:
    if isinstance(error, click.Abort):  # Ctrl-C
        return Interrupted("interrupted.")
    if isinstance(error, PartnerUnavailableError):
        return TrainingError(f"{error.what}: {error.fix}")
    if isinstance(error, ModuleNotFoundError):
        return TrainingError(f"{error.name} is not installed: pip install {error.name}")
    return TrainingError(str(error)) if isinstance(error, ShardgradError) else explain(error)


def _flushed() -> bool:
    """Writes what is left for standard output, or drops it: it would be tried, and reported, again
    at the end.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
