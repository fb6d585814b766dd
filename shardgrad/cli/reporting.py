"""How every command reports an expected error: one sentence on standard error, and the exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from shardgrad.errors import PartnerUnavailableError, ShardgradError
from shardgrad.train.failure import TrainingError

__all__ = ["reported"]


@contextmanager
def reported(program: str) -> Iterator[None]:
    """Prints expected errors of a block and exits; any other exception passes.

    A missing package and a usage error exit with status 2, other errors with 1 or the error's own status.

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


def _exit(text: str, status: int) -> NoReturn:
    # Names in a message may come from a file: escape control characters, keep the lines of an error.
    escaped = "\n".join(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
        for line in text.split("\n")
    )
    click.echo(escaped, err=True)
    sys.exit(status)
