"""The text to train on, as bytes. This module does not import PyTorch."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from shardgrad.programs.train.failure import UsageError, reason_of

LIMIT_NBYTES = 16 * 2**20  # more of a text is not read
_LIBRARY = sysconfig.get_paths()["stdlib"]


def name_of(path: str | None) -> str:
    """Returns what a text is called; see :func:`read_text`."""
    return f"Python's standard library ({_LIBRARY})" if path is None else path


def read_text(path: str | None, *, seq_len: int) -> bytearray:
    """Reads a text, the same bytes on every rank.

    Args:
        path: a file; None for the modules of Python's standard library, in the order of names.
        seq_len: bytes per sequence. The text must hold one sequence and the byte after it.

    Raises:
        UsageError: there is no text at `path`, or not enough, or it cannot be read.
    """
    text = bytearray()
    try:
        for file in sorted(Path(_LIBRARY).glob("*.py")) if path is None else [Path(path)]:
            if not file.is_file():  # nothing, or a pipe, which cannot be read on every rank
                raise UsageError(
                    f"There is no regular file at {file}: correct --data, or omit it in a new run "
                    "to train on the source of Python's standard library."
                )
            with file.open("rb") as stream:
                text += stream.read(LIMIT_NBYTES - len(text))
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise UsageError(f"{file} cannot be read ({reason_of(error)}): correct --data.") from error
    if len(text) <= seq_len:
        raise UsageError(
            f"{name_of(path)} has {len(text)} bytes, too few for sequences of {seq_len}: give "
            "more text with --data, or lower --seq-len."
        )
    return text
