"""Files of a checkpoint: written in blocks with checksums, and opened only if they are regular
files.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch

from shardgrad.checkpoint.index import BLOCK_NBYTES
from shardgrad.checkpoint.text import printable
from shardgrad.errors import CheckpointError
from shardgrad.extras import require

__all__ = [
    "DataFile",
    "blocks_of",
    "content_of",
    "make_folder",
    "memory_of",
    "open_plain",
    "read_into",
    "read_range",
    "replace_synced",
    "sync",
    "write_synced",
]

_ALIGNMENT = 64

# At import: views of tensors' bytes, and torch's object collectives in `peers.py`, need numpy.
require("numpy", feature="shardgrad.checkpoint")


class DataFile:
    """A new file of tensors' bytes; a context manager, which syncs the file to the disk at its end.

    While a block is written, a second thread computes its checksum; both release the interpreter
    lock.

    Args:
        path: path of the file, which must not exist.

    Attributes:
        nbytes: number of bytes written so far.

    Raises:
        OSError: from every method, for example if the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._stream = path.open("xb", buffering=0)
        self._summer = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self.nbytes = 0

    def append(self, blocks: Iterable[memoryview]) -> tuple[int, tuple[int, ...]]:
        """Writes a part of a tensor.

        Args:
            blocks: its bytes; all but the last block have `BLOCK_NBYTES`.

        Returns:
            The offset in the file, and the CRC-32 of each block.
        """
        self._write(memoryview(bytes(-self.nbytes % _ALIGNMENT)))
        start, checksums = self.nbytes, []
        for block in blocks:
            checksum = self._summer.submit(zlib.crc32, block)
            self._write(block)
            checksums.append(checksum.result())
        return start, tuple(checksums)

    def _write(self, block: memoryview) -> None:
        self.nbytes += len(block)
        while block:
            block = block[self._stream.write(block) :]

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                os.fsync(self._stream.fileno())
        finally:
            self._stream.close()
            self._summer.shutdown()


def blocks_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yields a tensor's bytes in row-major order, in blocks of `BLOCK_NBYTES`.

    A device tensor is copied to the host one block at a time. A tensor that is not contiguous is
    copied first.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), BLOCK_NBYTES):
        yield memory_of(flat[begin : begin + BLOCK_NBYTES].cpu())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns a writable view of the bytes of a contiguous tensor on the host."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def write_synced(path: Path, text: str) -> None:
    """Writes a new text file and syncs it to the disk."""
    with path.open("x", encoding="utf-8") as stream:
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
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_plain(path: Path, nbytes: int | None = None) -> int:
    """Opens a regular file, not a link, and returns the descriptor, which the caller closes.

    Args:
        path: path of the file; its last part has been checked to be a name.
        nbytes: size that the file must have; None allows any.

    Raises:
        CheckpointError: the file is missing, not a regular file, or of another size.
    """
    expected = "a regular file" if nbytes is None else f"a file of {nbytes} bytes"
    try:
        # Non-blocking, so that opening a named pipe does not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, expected, error.strerror or "nothing") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or nbytes not in (None, found.st_size):
        os.close(descriptor)
        got = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "no regular file"
        raise _unreadable(path, expected, got)
    return descriptor


def content_of(path: Path, most: int) -> bytes:
    """Returns what is in a regular file.

    Args:
        path: of the file.
        most: bytes it may have; a larger one is refused before any of it is read.

    Raises:
        CheckpointError: it is larger, not there, something else, or cannot be read.
    """
    descriptor = open_plain(path)
    try:
        nbytes = os.fstat(descriptor).st_size
        if nbytes > most:
            raise _unreadable(path, f"at most {most} bytes", f"{nbytes} bytes")
        return bytes(read_range(descriptor, 0, nbytes, path))
    finally:
        os.close(descriptor)


def read_range(descriptor: int, begin: int, nbytes: int, path: Path) -> bytearray:
    """Returns bytes of an open file.

    Raises:
        CheckpointError: the file is too short, or cannot be read.
    """
    buffer = bytearray(nbytes)
    read_into(descriptor, begin, memoryview(buffer), path)
    return buffer


def read_into(descriptor: int, begin: int, view: memoryview, path: Path) -> None:
    """Fills memory with bytes of an open file; raises what `read_range` raises."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done : done + BLOCK_NBYTES]], begin + done)
        except OSError as error:
            raise _unreadable(
                path, f"{len(view)} bytes at {begin}", error.strerror or "an error"
            ) from error
        if not count:
            raise _unreadable(path, f"{len(view)} bytes at {begin}", f"its end after {done}")
        done += count


def _unreadable(path: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's file {printable(path.name)} is missing or damaged",
        expected=expected,
        got=got,
        where=printable(path),
        fix="an older checkpoint; `shardgrad checkpoint verify` tells which are undamaged",
    )
