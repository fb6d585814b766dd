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

_MOST_NBYTES = 2**30  # of a file that is read whole


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
    sync(path)


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
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise OSError("this is another kind of file")
            yield stream
    except OSError as error:
        raise damaged(path, "a readable, regular file", str(error)) from error


@contextmanager
def content_of(path: Path, what: str) -> Iterator[bytes]:
    """Reads a regular file; the block makes what it is to hold of its bytes.

    Raises:
        CheckpointError: as `opened`; or it is larger than 1 GiB, and is not read; or the block
            raises an error, whatever the bytes of a damaged file spell.
    """
    with opened(path) as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        if nbytes > _MOST_NBYTES:
            raise damaged(path, f"at most {_MOST_NBYTES} bytes", f"{nbytes} bytes")
        content = stream.read()
    try:
        yield content
    except Exception as error:
        raise damaged(path, what, f"{type(error).__name__}: {error}") from error


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
