"""How every command reports an expected error: one message on standard error, and the exit
status.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from shardgrad.errors import OptionError, PartnerUnavailableError, ShardgradError
from shardgrad.programs.text import escaped
from shardgrad.programs.train.failure import Interrupted, TrainingError, explain


@contextmanager
def reported(program: str, *, debug: bool = False) -> Iterator[None]:
    """Prints an error of the block, and exits. Errors of click pass.

    The exit status is 2 for a missing package and for an option with a wrong value, the error's own
    for a `TrainingError`, 130 for Ctrl-C, and 1 for other errors.

    Args:
        program: prefix of the message, such as "shardgrad train".
        debug: print the traceback first.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except KeyboardInterrupt:
        _exit(f"{program}: interrupted.", Interrupted.exit_status)
    except BrokenPipeError:  # `| head`: click ends the program in silence
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        if not _flushed() and isinstance(error, OSError):
            error.filename = "standard output"  # which the system leaves out
        _exit(f"{program}: {_sentence(error)}", _status(error))


def _sentence(error: Exception) -> str:
    if isinstance(error, PartnerUnavailableError):
        return f"{error.what}: {error.fix}"
    if isinstance(error, OSError):
        return str(explain(error))
    if isinstance(error, TrainingError | ShardgradError):
        return str(error)
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first} (unexpected error: --debug prints its traceback)"


def _status(error: Exception) -> int:
    if isinstance(error, TrainingError):
        return error.exit_status
    return 2 if isinstance(error, PartnerUnavailableError | OptionError) else 1


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


def _exit(message: str, status: int) -> NoReturn:
    for line in message.split("\n"):  # a ShardgradError has several lines
        click.echo(escaped(line), err=True)
    sys.exit(status)
