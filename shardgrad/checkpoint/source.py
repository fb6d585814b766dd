"""Reads a checkpoint: its contents, the verification of its checksums, and its bytes."""

from __future__ import annotations

import hashlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import torch

from shardgrad.checkpoint.boxes import Box, row_runs
from shardgrad.checkpoint.files import content_of, memory_of, open_plain, read_into
from shardgrad.checkpoint.index import BLOCK_NBYTES, MOST_NBYTES, Entry, Index, Piece
from shardgrad.checkpoint.text import printable
from shardgrad.checkpoint.tree import Value
from shardgrad.errors import CheckpointError

__all__ = ["COMPLETE", "INDEX", "NativeSource", "Source", "is_complete", "marker_of"]

INDEX, COMPLETE = "index.json", "complete"
MARKER_NBYTES = 65  # a SHA-256 in hexadecimal and a newline
_MOST_OPEN = 100  # a checkpoint of many ranks has more files than a process may open


class Source(ABC):
    """A checkpoint open for reading; a context manager.

    Attributes:
        folder: folder of the checkpoint.
        tensors: tensors by name.
        values: values that are not tensors, by name.
        origin: library that writes checkpoints of this format.
        identity: text that differs between any two checkpoints.
    """

    origin: ClassVar[str]
    identity: str
    folder: Path
    tensors: Mapping[str, Entry]
    values: Mapping[str, Value]

    def __init__(self) -> None:
        self._exits = ExitStack()

    @abstractmethod
    def check(self, name: str, box: Box) -> None:
        """Reads the bytes that :meth:`fill` would read, and verifies their checksums.

        Args:
            name: name of a tensor.
            box: region of the tensor.

        Raises:
            CheckpointError: the bytes are damaged.
        """

    @abstractmethod
    def fill(self, name: str, box: Box, into: torch.Tensor) -> None:
        """Copies a region of a tensor, with the conversion of dtypes of `copy_`.

        Args:
            name: name of the tensor.
            box: region of the tensor.
            into: destination of the box's shape, on any device.

        Host memory: a few blocks of 4 MiB, or the largest row of a tensor if that is larger.
        """

    def read(self, name: str) -> torch.Tensor:
        """Returns an entire tensor on the host.

        Raises:
            CheckpointError: there is not enough memory. The tensor is as large as its bytes in the
                files.
        """
        entry = self.tensors[name]
        try:
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"there is no room for {printable(name)} of the checkpoint",
                expected=f"{entry.nbytes(Box.whole(entry.shape))} bytes of memory",
                got=printable(error),
                where=printable(self.folder),
                fix="a machine with more memory, or several ranks that load a part each",
            ) from error
        self.fill(name, Box.whole(entry.shape), tensor)
        return tensor

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()


class NativeSource(Source):
    """A checkpoint in shardgrad's format. See [Note: Format].

    Args:
        folder: folder of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, or its index or the size of a file is wrong.
            No tensor is read.
    """

    origin = "shardgrad.checkpoint"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.identity, index = _read_index(folder)
        self.tensors, self.values = index.tensors, index.values
        self._sizes = index.files
        self._open: dict[str, int] = {}
        self._buffer = bytearray(BLOCK_NBYTES)
        self._exits.callback(self._close_files)
        for name in index.files:
            self._descriptor(name)
        self._close_files()

    def check(self, name: str, box: Box) -> None:
        """Verifies the checksum of every block that overlaps the box."""
        entry = self.tensors[name]
        for piece in entry.pieces:
            common = box.meets(piece.box)
            if common is None:
                continue
            size, itemsize = entry.nbytes(piece.box), entry.dtype.itemsize
            ((_, first, last),) = row_runs(
                common.seen_from(piece.box), piece.box.shape, piece.box.numel
            )
            for number in range(
                first * itemsize // BLOCK_NBYTES, -(-last * itemsize // BLOCK_NBYTES)
            ):
                begin = number * BLOCK_NBYTES
                block = self._staging(min(BLOCK_NBYTES, size - begin))
                self._read(piece, begin, block)
                if zlib.crc32(block) != piece.checksums[number]:
                    raise _corrupt(name, self.folder / piece.file, piece.start + begin, len(block))

    def fill(self, name: str, box: Box, into: torch.Tensor) -> None:
        """Copies runs of rows; reads directly into a contiguous destination of the same dtype on
        the host.
        """
        entry = self.tensors[name]
        for piece in entry.pieces:
            common = box.meets(piece.box)
            if common is not None:
                target = into.detach()[common.seen_from(box).slices()]
                self._fill(piece, entry.dtype, common.seen_from(piece.box), target)

    def _fill(self, piece: Piece, dtype: torch.dtype, box: Box, target: torch.Tensor) -> None:
        itemsize, shape, done = dtype.itemsize, piece.box.shape, 0
        for part, first, last in row_runs(box, shape, BLOCK_NBYTES // itemsize):
            rows = target[done : done + part.shape[0]] if part.shape else target
            done += part.shape[0] if part.shape else 0
            is_alike = rows.dtype == dtype and rows.device.type == "cpu" and rows.is_contiguous()
            if is_alike and rows.numel() == last - first:
                self._read(piece, first * itemsize, memory_of(rows))
                continue
            staging = self._staging((last - first) * itemsize)
            self._read(piece, first * itemsize, staging)
            found = torch.frombuffer(staging, dtype=dtype)
            if part.shape:
                found = found.reshape(-1, *shape[1:])[(slice(None), *part.slices()[1:])]
            rows.copy_(found.reshape(rows.shape))

    def _staging(self, nbytes: int) -> memoryview:
        """Returns a buffer that the next call reuses, since allocation would cost more than the
        read.
        """
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]

    def _read(self, piece: Piece, begin: int, into: memoryview) -> None:
        read_into(self._descriptor(piece.file), piece.start + begin, into, self.folder / piece.file)

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._close_files()
            self._open[name] = open_plain(self.folder / name, self._sizes[name])
        return self._open[name]

    def _close_files(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def marker_of(index: bytes) -> str:
    """Returns the contents of the file `complete` for an index."""
    return hashlib.sha256(index).hexdigest() + "\n"


def is_complete(folder: Path) -> bool:
    """Returns whether a folder is a complete checkpoint in shardgrad's format. Does not read the
    index.
    """
    return (folder / COMPLETE).is_file() and (folder / INDEX).is_file()


def _read_index(folder: Path) -> tuple[str, Index]:
    marker = content_of(folder / COMPLETE, MARKER_NBYTES)
    text = content_of(folder / INDEX, MOST_NBYTES)
    if marker.decode("ascii", "replace") != marker_of(text):
        raise CheckpointError(
            "the checkpoint's index is not the one that was completed",
            expected=f"an {INDEX} with the SHA-256 in {COMPLETE}",
            got=printable(marker_of(text).strip()),
            where=printable(folder),
            fix="an older checkpoint; `shardgrad checkpoint verify` tells which are undamaged",
        )
    return marker_of(text).strip(), Index.from_json(text)


def _corrupt(name: str, path: Path, start: int, nbytes: int) -> CheckpointError:
    return CheckpointError(
        f"{printable(name)} in the checkpoint is damaged",
        expected="the bytes that were written, by their CRC-32",
        got=f"others, among {nbytes} at {start} of {printable(path.name)}",
        where=printable(path),
        fix="an older checkpoint; `shardgrad checkpoint verify` tells which are undamaged",
    )
