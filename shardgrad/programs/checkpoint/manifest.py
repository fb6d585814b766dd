"""The manifest: size and checksum of every file of a checkpoint, computed while it is written."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from shardgrad.errors import CheckpointError
from shardgrad.programs.checkpoint.files import (
    content_of,
    damaged,
    named_in_errors,
    open_plain,
    write_synced,
)
from shardgrad.programs.text import printable

MANIFEST = "manifest.json"
Manifest = Mapping[str, tuple[int, int]]  # of each file: number of bytes, CRC-32
_VERSION = 1
_MOST_NBYTES = 2**28
_BLOCK_NBYTES = 4 * 2**20


class SummingFiles(FileSystem):
    """The file system of torch's writer, which also sums up what is written.

    Attributes:
        sums: size and checksum of every file that was written and closed, by name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Opens a new file for writing."""
        with named_in_errors(path), _SummingStream(path, "x") as stream:
            try:
                yield stream
            except RuntimeError as error:
                if stream.failure is None:
                    raise
                # torch's archive writer tells where it failed, and hides why.
                raise stream.failure from error
        self.sums[Path(path).name] = stream.nbytes, stream.checksum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Renames a file, and its sum."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummingStream(io.FileIO):
    """Without a buffer: torch syncs some files before it flushes them."""

    nbytes = checksum = 0
    failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.checksum = zlib.crc32(view, self.checksum)
        self.nbytes += len(view)
        written = 0
        try:
            while written < len(view):
                written += super().write(view[written:])
        except OSError as error:
            self.failure = error
            raise
        return written


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest."""
    text = json.dumps({"version": _VERSION, "files": manifest}, separators=(",", ":"))
    write_synced(folder / MANIFEST, text)


def read(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint; an empty one if another tool wrote the checkpoint.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return {}
    try:
        found = json.loads(content_of(path, _MOST_NBYTES))
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']}")
        manifest = {name: (int(n), int(crc)) for name, (n, crc) in found["files"].items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"a manifest of version {_VERSION}"
        raise damaged(path, what, f"{type(error).__name__}: {error}") from error
    if not all(map(is_name, manifest)):
        raise damaged(path, "names of files in the folder", printable(list(manifest)))
    return manifest


def is_name(name: object) -> bool:
    """Returns whether a text from a checkpoint can only name a file in its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def check(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compares files with their checksums.

    Raises:
        CheckpointError: names the first file that is damaged.
    """
    for name in names:
        nbytes, right = manifest[name]
        path = folder / name
        with open_plain(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != nbytes:
                raise damaged(path, f"{nbytes} bytes", f"{size} bytes")
            checksum = 0
            try:
                while block := stream.read(_BLOCK_NBYTES):
                    checksum = zlib.crc32(block, checksum)
            except OSError as error:
                raise damaged(path, "a readable file", str(error)) from error
        if checksum != right:
            raise damaged(path, f"CRC-32 {right:08x}", f"{checksum:08x}")


def verify(folder: Path | str) -> Manifest:
    """Reads every byte of a checkpoint and compares it with its checksums.

    Returns:
        Size and checksum of every file, by name.

    Raises:
        CheckpointError: names the first file that is missing or damaged, or there are no checksums.
    """
    manifest = read(Path(folder))
    if not manifest:
        raise CheckpointError(
            "there are no checksums to verify",
            expected=f"a file {MANIFEST}, which `shardgrad.checkpoint.save` writes",
            got="none",
            where=printable(folder),
            fix="correct the path; checkpoints of other tools can be loaded but not verified",
        )
    check(Path(folder), manifest, manifest)
    return manifest
