"""Reads checkpoints of `torch.distributed.checkpoint` without executing code in them.

torch stores the metadata in `.metadata`, a pickle, and each part of a tensor as a `torch.save`
archive. Here the pickle may name only the classes that metadata consists of, and archives are
loaded with `weights_only`.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardgrad.checkpoint.boxes import Box, tile
from shardgrad.checkpoint.files import content_of, open_plain, read_range
from shardgrad.checkpoint.index import (
    DTYPES,
    LARGEST,
    MOST_DIMENSIONS,
    MOST_NBYTES,
    Entry,
    Piece,
    overlap,
)
from shardgrad.checkpoint.pickles import check_pickle
from shardgrad.checkpoint.source import Source
from shardgrad.checkpoint.text import printable
from shardgrad.checkpoint.tree import Value, flatten, join
from shardgrad.errors import CheckpointError

__all__ = ["METADATA", "TorchSource"]

METADATA = ".metadata"
_SCRIPT_OVERHEAD_NBYTES = 2**20  # largest size of an archive without its tensor
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    *(
        (_METADATA_MODULE, name)
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
    ),
    *((_METADATA_MODULE, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class _Record:
    """Replaces an object of torch's classes: attributes without methods."""

    def __init__(self, *arguments: Any) -> None:
        self._facts: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        # TensorProperties has a tuple, whose first item is the dtype.
        self._facts = state if isinstance(state, dict) else {"dtype": state[0]}

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("_facts", {})
        if name.startswith("__") or name not in facts:
            raise AttributeError(f"the list of contents has no {name}")
        return facts[name]


class _Unpickler(pickle.Unpickler):
    """Creates records, tuples and dictionaries only, and no instance of torch's classes."""

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))
        self._kinds: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Returns the replacement of a global."""
        if (module, name) in _RECORDS:
            return self._kinds.setdefault(name, type(name, (_Record,), {}))
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        harmless = _HARMLESS.get((module, name))
        if harmless is None:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a list of contents")
        return harmless


def _nothing(*parts: Any) -> None:
    """Replaces layouts, memory formats and the path that torch wrote to, which are not used."""


_HARMLESS = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("torch.serialization", "_get_layout"): _nothing,
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib", "WindowsPath"): _nothing,
    ("pathlib._local", "PosixPath"): _nothing,
    (
        "builtins",
        "getattr",
    ): _nothing,  # with which Python 3.11.0 to 3.11.3 pickle a member of an enum
}
_DTYPES = {f"torch {name}" for name in DTYPES}
_NAMES = {" ".join(name) for name in (*_RECORDS, *_HARMLESS)} | _DTYPES

# What torch.save writes for tensors and plain data.
_ARCHIVE_CALLS = {
    *("collections OrderedDict", "torch Size"),
    *(f"torch._utils {name}" for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")),
}
_ARCHIVE_NAMES = {
    *_ARCHIVE_CALLS,
    *_DTYPES,
    *(f"torch {storage.__name__}" for storage in torch._storage_classes),
    *("torch.storage UntypedStorage", "torch.storage TypedStorage"),
}


class TorchSource(Source):
    """A checkpoint written by `torch.distributed.checkpoint.save` into a folder.

    Each archive has a CRC-32. A part of a tensor is read as a whole, so host memory for the largest
    part is needed.

    Args:
        folder: folder of the checkpoint.

    Raises:
        CheckpointError: the metadata is missing, contains more than data, or is inconsistent with
            itself or the files. No tensor is read.
    """

    origin = "torch.distributed.checkpoint"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.identity, metadata = _read_metadata(folder)
        try:
            self._pieces = _located(folder, metadata)
            self.tensors, self.values = self._contents(metadata)
        except (AttributeError, TypeError, LookupError, ValueError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise _refused(
                folder, "a list of contents", f"{type(error).__name__}: {error}"
            ) from error

    def check(self, name: str, box: Box) -> None:
        """Verifies the checksums of the archives that overlap the box, and loads them."""
        entry = self.tensors[name]
        for piece in entry.pieces:
            if box.meets(piece.box) is not None:
                self._tensor(
                    name, entry, piece, tests=True
                )  # torch's reader is stricter than checksums

    def fill(self, name: str, box: Box, into: torch.Tensor) -> None:
        """Loads the archives that overlap the box and copies from them."""
        entry = self.tensors[name]
        for piece in entry.pieces:
            common = box.meets(piece.box)
            if common is not None:
                data = self._tensor(name, entry, piece, tests=False)
                target = into.detach()[common.seen_from(box).slices()]
                target.copy_(data[common.seen_from(piece.box).slices()])

    def _contents(self, metadata: _Record) -> tuple[Mapping[str, Entry], Mapping[str, Value]]:
        tensors, values = {}, {}
        for key, stored in metadata.state_dict_metadata.items():
            path = tuple((metadata.planner_data or {}).get(key, (key,)))
            name = join(path)
            if type(stored).__name__ == "TensorStorageMetadata":
                tensors[name] = self._entry(name, key, stored)
            else:
                values.update(self._values(name, key))
        return tensors, values

    def _entry(self, name: str, key: str, stored: _Record) -> Entry:
        boxes = [Box(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in stored.chunks]
        boxes = [box for box in boxes if box.numel]
        shape, dtype = _sizes(stored.size), stored.properties.dtype
        if dtype not in DTYPES.values() or not tile(boxes, shape):
            raise _refused(self.folder, f"pieces that make up {shape}", "others", where=name)
        pieces = []
        for box in boxes:
            file, start, nbytes = self._pieces[key, box.offset]
            if nbytes < box.numel * dtype.itemsize:  # before room is made for it
                raise _refused(
                    self.folder, f"the bytes of {box.shape}", f"{nbytes} bytes", where=name
                )
            pieces.append(Piece(file, start, box, ()))
        self._pieces.update({(name, p.box.offset): self._pieces[key, p.box.offset] for p in pieces})
        return Entry(dtype, shape, tuple(pieces))

    def _values(self, name: str, key: str) -> dict[str, Value]:
        file, start, nbytes = self._pieces[key, None]
        value = self._load(name, self._opened(name, self._read(file, start, nbytes), tests=True))
        found: dict[str, Value] = {}
        for leaf, kept in flatten({"v": value}).items():
            if isinstance(kept, torch.Tensor):
                raise _refused(
                    self.folder, "tensors in separate entries", "a tensor in a value", name
                )
            found[name + leaf[1:]] = kept
        return found

    def _tensor(self, name: str, entry: Entry, piece: Piece, *, tests: bool) -> torch.Tensor:
        data = self._load(name, self._archive(name, piece, tests=tests))
        got = (
            f"{data.dtype} {tuple(data.shape)}"
            if isinstance(data, torch.Tensor)
            else str(type(data))
        )
        expected = f"{entry.dtype} {piece.box.shape}"
        if not isinstance(data, torch.Tensor) or got != expected:
            raise _refused(self.folder, expected, got, where=name)
        return data

    def _load(self, name: str, archive: io.BytesIO) -> Any:
        try:
            return torch.load(archive, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many types for damaged or hostile archives
            raise _refused(
                self.folder, "an archive that holds only data", printable(error), where=name
            ) from error

    def _archive(self, name: str, piece: Piece, *, tests: bool) -> io.BytesIO:
        """Returns the archive of a part, after a check of its size."""
        file, start, nbytes = self._pieces[name, piece.box.offset]
        entry = self.tensors[name]
        limit = entry.nbytes(piece.box) + _SCRIPT_OVERHEAD_NBYTES
        if nbytes > limit:
            raise _refused(self.folder, f"at most {limit} bytes", f"{nbytes} bytes", where=name)
        return self._opened(name, self._read(file, start, nbytes), tests=tests)

    def _opened(self, name: str, text: bytearray, *, tests: bool) -> io.BytesIO:
        """Returns an archive after a check of its directory, and of its checksums if `tests` is
        set.
        """
        stream = io.BytesIO(text)
        damaged = "another"
        try:
            with zipfile.ZipFile(stream) as archive:
                members = archive.infolist()
                is_plain = {member.compress_type for member in members} == {zipfile.ZIP_STORED}
                # Members that share bytes would be read as often as they are listed.
                if is_plain and sum(member.file_size for member in members) <= len(text):
                    damaged = (archive.testzip() if tests else None) or ""
                    for member in members:
                        if member.filename.lower().endswith("data.pkl"):  # torch ignores case
                            check_pickle(
                                archive.read(member), names=_ARCHIVE_NAMES, calls=_ARCHIVE_CALLS
                            )
        except pickle.UnpicklingError as error:
            raise _refused(
                self.folder, "an archive that holds only data", printable(error), where=name
            ) from error
        except Exception as error:  # whatever a damaged archive makes its reader raise
            raise _refused(
                self.folder, "a torch.save archive", printable(error), where=name
            ) from error
        if damaged:
            raise _refused(
                self.folder, "an undamaged, uncompressed archive", printable(damaged), where=name
            )
        stream.seek(0)
        return stream

    def _read(self, file: str, start: int, nbytes: int) -> bytearray:
        descriptor = open_plain(self.folder / file)
        try:
            return read_range(descriptor, start, nbytes, self.folder / file)
        finally:
            os.close(descriptor)


_Located = dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]


def _located(folder: Path, metadata: _Record) -> _Located:
    """Returns file, first byte and size of every piece; all inside files that lie in the folder."""
    sizes: dict[str, int] = {}
    found: _Located = {}
    for index, info in metadata.storage_data.items():
        file, (start, nbytes) = info.relative_path, _sizes((info.offset, info.length))
        if not isinstance(file, str) or "/" in file or file in ("", ".", ".."):
            raise _refused(folder, "names of files without folders", printable(file))
        if getattr(info, "transform_descriptors", None):
            raise _refused(
                folder, "pieces as they are", f"pieces transformed by {info.transform_descriptors}"
            )
        if file not in sizes:
            descriptor = open_plain(folder / file)
            sizes[file] = os.fstat(descriptor).st_size
            os.close(descriptor)
        if start + nbytes > sizes[file]:
            got = f"{nbytes} bytes at {start}"
            raise _refused(
                folder, f"bytes inside {file}, which has {sizes[file]}", got, where=index.fqn
            )
        offset = getattr(index, "offset", None)
        key = index.fqn, None if offset is None else _sizes(offset)
        found[key] = file, start, nbytes
    file = overlap(found.values())
    if file is not None:
        raise _refused(
            folder, "bytes that belong to one entry each", "entries that share bytes", where=file
        )
    return found


def _sizes(raw: Any) -> tuple[int, ...]:
    """Returns sizes or offsets, which a pickle may have made anything else."""
    sizes = tuple(raw)
    if len(sizes) > MOST_DIMENSIONS or not all(
        type(size) is int and 0 <= size < LARGEST for size in sizes
    ):
        raise ValueError(f"{printable(sizes)} are no sizes")
    return sizes


def _read_metadata(folder: Path) -> tuple[str, _Record]:
    text = content_of(folder / METADATA, MOST_NBYTES)
    try:
        check_pickle(text, names=_NAMES, calls=_NAMES)
        metadata = _Unpickler(text).load()
    except Exception as error:  # a damaged pickle raises whatever its bytes spell
        raise _refused(folder, "a list of contents and nothing else", printable(error)) from error
    if type(metadata).__name__ != "Metadata":
        raise _refused(folder, "a list of contents", type(metadata).__name__)
    record: _Record = metadata
    return hashlib.sha256(text).hexdigest(), record  # torch numbers its saves in there


def _refused(folder: Path, expected: str, got: str, where: str | None = None) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged, or was not written by torch.distributed.checkpoint",
        expected=expected,
        got=printable(got),
        where=printable(folder if where is None else where),
        fix="another checkpoint",
    )
