"""The text to train on, as bytes. This module does not import PyTorch."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from shardgrad.programs.train.failure import UsageError, reason_of

LIMIT_NBYTES = 16 * 2**20  # more of a text is not read
_LIBRARY = sysconfig.get_paths()["stdlib"]
# Folders of third-party packages, caches and tests.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def name_of(path: str | None) -> str:
    """Returns what a text is called; see :func:`read_text`."""
    return f"Python's standard library ({_LIBRARY})" if path is None else path


def read_text(
    path: str | None, *, seq_len: int, limit_nbytes: int = LIMIT_NBYTES
) -> tuple[bytearray, int]:
    """Reads a text, the same bytes in the same order on every rank.

    Args:
        path: a file, or a folder whose visible files are read in the order of their relative paths;
            None for the `*.py` files of Python's standard library.
        seq_len: bytes per sequence. The text must hold one sequence and the byte after it.
        limit_nbytes: largest number of bytes to read.

    Returns:
        The text, and the number of files that were read.

    Raises:
        UsageError: there is no text at `path`, or not enough, or it cannot be read.
    """
    text, count = bytearray(), 0
    try:
        for file in _files_of(Path(path or _LIBRARY), "" if path else ".py"):
            with file.open("rb") as stream:
                text += stream.read(min(limit_nbytes - len(text), file.stat().st_size))
            count += 1
            if len(text) == limit_nbytes:
                break
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        where = getattr(error, "filename", None) or path
        raise UsageError(f"{where} cannot be read ({reason_of(error)}): correct --data.") from error
    if len(text) <= seq_len:
        raise UsageError(
            f"{name_of(path)} has {len(text)} bytes, too few for sequences of {seq_len}: give "
            "more text with --data, or lower --seq-len."
        )
    return text, count


def _files_of(root: Path, suffix: str) -> Iterator[Path]:
    """Yields a file, or the files below a folder in a fixed order, without hidden and skipped
    ones.
    """
    if root.is_file():
        yield root
        return
    if not root.is_dir():  # nothing, or a pipe or a device, which cannot be read on every rank
        raise UsageError(
            f"There is no file or folder at {root}: correct --data, or omit it in a new run to "
            "train on the source of Python's standard library."
        )
    for folder, subfolders, names in os.walk(root):
        # Assigned in place: os.walk visits the folders of this list, in its order.
        subfolders[:] = sorted(
            s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith(".")
        )
        for name in sorted(names):
            # Regular files: opening a named pipe waits for a writer, and a device has no end.
            if name.endswith(suffix) and not name.startswith(".") and Path(folder, name).is_file():
                yield Path(folder, name)
