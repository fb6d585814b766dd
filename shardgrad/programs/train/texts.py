"""The files of a text, and whether they are enough to train on. This module does not import
PyTorch.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from shardgrad.programs.train.failure import UsageError

# Folders of third-party packages, caches and tests.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def source_of(path: str | None) -> str:
    """Returns what a text is called."""
    return (
        f"Python's standard library ({sysconfig.get_paths()['stdlib']})" if path is None else path
    )


def parts_of(path: str | None, limit_nbytes: int) -> list[tuple[Path, int]]:
    """Returns the files of a text in their order, and how many bytes of each are read.

    Args:
        path: a file, or a folder whose visible files are read in the order of their relative paths;
            None for the `*.py` files of Python's standard library.
        limit_nbytes: largest number of bytes to read.

    Raises:
        UsageError: there is nothing at `path`, or a pipe.
        OSError: it cannot be looked at.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path)
    if not root.exists():
        raise UsageError(
            f"There is no file or folder at {path}: correct --data, or leave it out of a new run "
            "to train on the source of Python's standard library."
        )
    if not root.is_file() and not root.is_dir():
        raise UsageError(
            f"{path} is a pipe or a device, which cannot be read on every rank: save the text to a "
            "file, and give that to --data."
        )
    files = [root] if root.is_file() else _files_under(root, suffix=".py" if path is None else "")
    parts, left = [], limit_nbytes
    for file in files:
        if not left:
            break
        nbytes = min(left, file.stat().st_size)
        parts.append((file, nbytes))
        left -= nbytes
    return parts


def require_text(
    path: str | None, *, limit_nbytes: int, validation_fraction: float, seq_len: int
) -> None:
    """Refuses a text that is too short, by the sizes of its files.

    Args:
        path: as for `parts_of`.
        limit_nbytes: largest number of bytes to read.
        validation_fraction: fraction of the bytes, at the end, to hold out.
        seq_len: bytes per sequence.

    Raises:
        UsageError: there is no text at `path`, or not enough, or it cannot be looked at.
    """
    try:
        nbytes = sum(nbytes for _, nbytes in parts_of(path, limit_nbytes))
    except (OSError, ValueError) as error:  # a path that no file can have
        raise UsageError(f"{path} cannot be read ({error}): correct --data.") from error
    held_out_nbytes(source_of(path), nbytes, validation_fraction, seq_len)


def held_out_nbytes(source: str, nbytes: int, validation_fraction: float, seq_len: int) -> int:
    """Returns how many bytes at the end of a text are held out.

    Raises:
        UsageError: one of the parts has no sequence and the byte after it.
    """
    held_out = int(nbytes * validation_fraction)
    if min(held_out, nbytes - held_out) <= seq_len:
        raise UsageError(
            f"{source} holds {nbytes} bytes, {held_out} of them for validation, too few for "
            f"sequences of {seq_len}: give more text with --data, or lower --seq-len."
        )
    return held_out


def _files_under(root: Path, *, suffix: str) -> Iterator[Path]:
    """Yields the files below `root` in a fixed order, without hidden and skipped folders and
    files.
    """
    for folder, subfolders, names in os.walk(root):
        # Assigned in place: os.walk visits the folders of this list, in its order.
        subfolders[:] = sorted(
            s for s in subfolders if s not in _SKIPPED_FOLDERS and not s.startswith(".")
        )
        for name in sorted(names):
            # Regular files: opening a named pipe waits for a writer, and a device has no end.
            if name.endswith(suffix) and not name.startswith(".") and Path(folder, name).is_file():
                yield Path(folder, name)
