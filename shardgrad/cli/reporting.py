"""How every command reports an expected error: one message on standard error, and the exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from shardgrad.errors import PartnerUnavailableError, ShardgradError
from shardgrad.train.failure import TrainingError

__all__ = ["escaped", "reported"]


@contextmanager
def reported(program: str) -> Iterator[None]:
    """Prints an expected error of the block and exits; other exceptions pass.

    The exit status is 2 for a missing package, the error's own for a `TrainingError`, and 1 for other errors.

    Args:
        program: prefix of the message, such as "shardgrad train".
    """
    try:
        yield
    except TrainingError as error:
        _exit(f"{program}: {error}", error.exit_status)
    except PartnerUnavailableError as error:
        _exit(f"{program}: {error.what}: {error.fix}", 2)
    except ShardgradError as error:
        _exit(f"{program}: {error}", 1)
    except OSError as error:
        _exit(f"{program}: {error}: free space, or correct the path.", 1)


def escaped(text: object) -> str:
    """Returns text with control characters escaped, so that names from files cannot steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def _exit(message: str, status: int) -> NoReturn:
    for line in message.split("\n"):  # a ShardgradError has several lines
        click.echo(escaped(line), err=True)
    sys.exit(status)
