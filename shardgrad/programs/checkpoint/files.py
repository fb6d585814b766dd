"""Files that survive a power failure, and that are opened only if they are regular files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shardgrad.errors import CheckpointError
from shardgrad.programs.text import printable


@contextmanager
def named_in_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Has an `OSError` of the block name a file, which the system does not for writes and syncs."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def write_synced(path: Path, text: str) -> None:
    """Writes a new text file and syncs it to the disk."""
    with named_in_errors(path), path.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def replace_synced(path: Path, text: str) -> None:
    """Replaces a text file: at every instant the old one or the new one is there; the new one when
    this returns.
    """
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    write_synced(fresh, text)
    fresh.replace(path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Makes a folder, and those it lies in, that survive a power failure from then on."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file, not a link, for reading.

    Raises:
        CheckpointError: the file is missing, is not a regular file, or cannot be read.
    """
    try:
        # Non-blocking, so that opening a named pipe does not wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise OSError("this is another kind of file")
            yield stream
    except OSError as error:
        raise damaged(path, "a readable, regular file", str(error)) from error


def content_of(path: Path, most: int) -> bytes:
    """Returns what is in a regular file.

    Raises:
        CheckpointError: it has more than `most` bytes, and none of them is read; or as `opened`.
    """
    with opened(path) as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes > most:
            raise damaged(path, f"at most {most} bytes", f"{nbytes} bytes")
        return stream.read()


def damaged(path: Path, expected: str, got: str) -> CheckpointError:
    """Returns the error that names a file of a checkpoint."""
    return CheckpointError(
        f"the checkpoint's file {printable(path.name)} is missing or damaged",
        expected=expected,
        got=printable(got),
        where=printable(path),
        fix="correct the path, or use an older checkpoint; `shardgrad checkpoint verify` finds "
        "undamaged ones",
    )
