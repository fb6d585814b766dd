"""The index of a checkpoint, `index.json`, which is validated completely when it is read.

[Note: Format] A checkpoint is a folder with three kinds of files.

- `rank_00000.bin`, ...: the bytes of tensors, little-endian and row-major, one part after the
  other, each at
a
  multiple of 64 bytes. Each rank writes one file; the index has the location of every part.
- `index.json`: names, dtypes, shapes, parts with a CRC-32 of every 4 MiB of each, values that are
  not
tensors,
  and the size of every file.
- `complete`: the SHA-256 of `index.json` in hexadecimal. It is written last, after everything else
  is on the disk: a folder without it is not a checkpoint.

A checkpoint contains no code, and no path outside of its folder.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardgrad.checkpoint.boxes import Box, tile
from shardgrad.checkpoint.text import printable
from shardgrad.checkpoint.tree import Value
from shardgrad.errors import CheckpointError, CheckpointVersionError

__all__ = [
    "BLOCK_NBYTES",
    "DTYPES",
    "LARGEST",
    "MOST_DIMENSIONS",
    "MOST_NBYTES",
    "Entry",
    "Index",
    "Piece",
    "overlap",
]

BLOCK_NBYTES = 4 * 2**20
_FORMAT, _VERSION = "shardgrad-checkpoint", 1
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
LARGEST = 2**62  # limit of numbers of bytes and elements
MOST_NBYTES = 2**30  # limit of a list of contents; ours has about a hundred bytes per piece
MOST_DIMENSIONS = 64  # the limit of torch

# By the name in the file. Other dtypes (quantized, complex32) are not supported.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.complex128,
        ),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        torch.float8_e8m0fnu,
    )
}


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in a file.

    Attributes:
        file: name of the file.
        start: offset of the first byte in the file.
        box: region of the tensor.
        checksums: CRC-32 of each block of `BLOCK_NBYTES`.
    """

    file: str
    start: int
    box: Box
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor in a checkpoint.

    Attributes:
        dtype: dtype of the elements.
        shape: global shape.
        pieces: parts that cover the tensor exactly once.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def nbytes(self, box: Box) -> int:
        """Returns the number of bytes of a box of the tensor."""
        return box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Index:
    """The contents of a checkpoint without the bytes of tensors.

    Attributes:
        tensors: tensors by name.
        values: values that are not tensors, by name.
        files: sizes of the data files in bytes, by name.
    """

    tensors: Mapping[str, Entry]
    values: Mapping[str, Value]
    files: Mapping[str, int]

    def to_json(self) -> str:
        """Returns the text of `index.json`."""
        files = list(self.files)
        number = {name: i for i, name in enumerate(files)}
        tensors = {
            name: [
                str(entry.dtype).removeprefix("torch."),
                entry.shape,
                [
                    [number[p.file], p.start, p.box.offset, p.box.shape, p.checksums]
                    for p in entry.pieces
                ],
            ]
            for name, entry in self.tensors.items()
        }
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "byte_order": sys.byteorder,
            "block": BLOCK_NBYTES,
        }
        body = {"files": [[name, self.files[name]] for name in files], "values": dict(self.values)}
        return json.dumps({**head, **body, "tensors": tensors}, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Index:
        """Parses and validates the text of `index.json`.

        Raises:
            CheckpointError: the text is malformed or inconsistent, or (`CheckpointVersionError`) of
                another version of the format.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _malformed("index.json", "JSON", printable(error)) from None
        _refuse_other_version(raw)
        head = _table(raw, "index.json", {"format", "version", "byte_order", "block", *_BODY})
        expected = {
            "format": _FORMAT,
            "version": _VERSION,
            "byte_order": sys.byteorder,
            "block": BLOCK_NBYTES,
        }
        for key, right in expected.items():
            if head[key] != right or type(head[key]) is not type(right):
                raise _malformed(f"{key} in index.json", repr(right), printable(head[key]))
        files = _files(head["files"])
        values = _table(head["values"], "values")
        for name, value in values.items():
            if not (value is None or type(value) in (bool, int, float, str)):
                raise _malformed(name, "a number, text, boolean or null", type(value).__name__)
        tensors = {
            name: _entry(name, entry, files)
            for name, entry in _table(head["tensors"], "tensors").items()
        }
        _refuse_overlaps(tensors)
        both = tensors.keys() & values.keys()
        if both:
            raise _malformed(min(both), "a tensor or a value", "both")
        return cls(tensors, values, dict(files))


_BODY = ("files", "values", "tensors")


def _refuse_other_version(raw: Any) -> None:
    """Raises the error for an index of another version of the format, whatever else is in it."""
    version = (
        raw.get("version") if isinstance(raw, dict) and raw.get("format") == _FORMAT else _VERSION
    )
    if type(version) is int and version != _VERSION:
        convert = (
            "convert it with the one that wrote it: `shardgrad checkpoint convert PATH weights "
            "--to torch`"
        )
        is_newer = version > _VERSION
        raise CheckpointVersionError(
            f"the checkpoint was written by {'a newer' if is_newer else 'an older'} shardgrad",
            expected=f"version {_VERSION} of the format",
            got=f"version {printable(version)}",
            where="index.json",
            fix=f"pip install --upgrade shardgrad, or {convert}" if is_newer else convert,
        )


def _files(raw: Any) -> list[tuple[str, int]]:
    files: dict[str, int] = {}
    for item in _row(raw, "files"):
        name, nbytes = _row(item, "files", 2)
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name in files:
            raise _malformed("files", "names without folders, each once", printable(name))
        files[name] = _count(nbytes, f"size of {name}")
    return list(files.items())


def _entry(name: str, raw: Any, files: list[tuple[str, int]]) -> Entry:
    dtype_name, raw_shape, raw_pieces = _row(raw, name, 3)
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise _malformed(f"dtype of {printable(name)}", ", ".join(DTYPES), printable(dtype_name))
    dtype, shape = DTYPES[dtype_name], _counts(raw_shape, name)
    if len(shape) > MOST_DIMENSIONS:
        raise _malformed(name, f"at most {MOST_DIMENSIONS} dimensions", str(len(shape)))
    pieces = tuple(_pieces(name, raw_pieces, files, dtype, len(shape)))
    if not tile([piece.box for piece in pieces], shape):
        raise _malformed(name, f"pieces that make up {shape}", "pieces that overlap or leave gaps")
    return Entry(dtype, shape, pieces)


def _pieces(
    name: str, raw: Any, files: list[tuple[str, int]], dtype: torch.dtype, ndim: int
) -> Iterator[Piece]:
    for item in _row(raw, name):
        number, start, offset, size, checksums = _row(item, name, 5)
        box = Box(_counts(offset, name, ndim), _counts(size, name, ndim))
        if _count(number, name) >= len(files):
            raise _malformed(name, f"one of {len(files)} files", f"number {number}")
        file, file_nbytes = files[number]
        nbytes = box.numel * dtype.itemsize
        if _count(start, name) + nbytes > file_nbytes:
            raise _malformed(
                name, f"bytes inside {file}, which has {file_nbytes}", f"{nbytes} bytes at {start}"
            )
        sums = _counts(checksums, name, -(-nbytes // BLOCK_NBYTES))
        yield Piece(file, start, box, sums)


def overlap(ranges: Iterable[tuple[str, int, int]]) -> str | None:
    """Returns a file of which two ranges, given as name, first byte and size, share bytes; None if
    there is none.
    """
    ends: dict[str, int] = {}
    for file, start, nbytes in sorted(ranges):
        if start < ends.get(file, 0):
            return file
        ends[file] = start + nbytes
    return None


def _refuse_overlaps(tensors: Mapping[str, Entry]) -> None:
    """Refuses pieces that share bytes: what is loaded would be larger than the files, without any
    limit.
    """
    file = overlap((p.file, p.start, e.nbytes(p.box)) for e in tensors.values() for p in e.pieces)
    if file is not None:
        raise _malformed(file, "bytes that belong to one piece each", "pieces that share bytes")


def _table(raw: Any, where: str, keys: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(raw, dict) or (keys is not None and set(raw) != keys):
        got = _keys(raw) if isinstance(raw, dict) else type(raw).__name__
        raise _malformed(where, f"a table of {sorted(keys)}" if keys else "a table", got)
    return raw


def _keys(raw: Mapping[str, Any]) -> str:
    return printable(sorted(raw)[:20])


def _row(raw: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(raw, list) or (length is not None and len(raw) != length):
        raise _malformed(where, "a list" if length is None else f"{length} items", printable(raw))
    return raw


def _count(raw: Any, where: str) -> int:
    if type(raw) is not int or not 0 <= raw < LARGEST:
        raise _malformed(where, "a number from 0 to 2**62", printable(raw))
    return raw


def _counts(raw: Any, where: str, length: int | None = None) -> tuple[int, ...]:
    return tuple(_count(item, where) for item in _row(raw, where, length))


def _malformed(where: str, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint's index is malformed",
        expected=expected,
        got=got,
        where=printable(where),
        fix="another checkpoint: this one is damaged, or was not written by shardgrad.checkpoint",
    )
