"""What a checkpoint says of itself: size and checksum of each file, and what of which tensor is
where.

The first is our file `manifest.json`; the other, `.metadata`, is of torch's format, and is
unpickled into classes of the format and nothing else.
"""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardgrad.programs.checkpoint.files import content_of, damaged, opened
from shardgrad.programs.text import printable

MANIFEST, METADATA = "manifest.json", ".metadata"
VERSION = 1  # of the manifest
Manifest = Mapping[str, tuple[int, int]]  # of each other file: number of bytes, CRC-32
_BLOCK_NBYTES = 4 * 2**20
_CLASSES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,  # the path that torch wrote to
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    # Python 3.11.0 to 3.11.3 pickles a member of an enum as getattr(the enum, its name).
    ("builtins", "getattr"): lambda _, name: metadata._MEM_FORMAT_ENCODING[name],
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{
        (metadata.__name__, name): made
        for name, made in vars(metadata).items()
        if isinstance(made, type) and made.__module__ == metadata.__name__
    },
    **{("torch", name): it for name, it in vars(torch).items() if isinstance(it, torch.dtype)},
}


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint; an empty one if another tool wrote the checkpoint.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return {}
    with content_of(path, f"a manifest of version {VERSION}") as content:
        found = json.loads(content)
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}")
        manifest = {name: (int(n), int(crc)) for name, (n, crc) in found["files"].items()}
        if METADATA not in manifest or not all(map(_is_name, manifest)):
            raise ValueError("other files than a checkpoint has")
    return manifest


def _is_name(name: str) -> bool:
    """Returns whether a text from a checkpoint can only name something in its folder."""
    return name.isprintable() and "/" not in name


def check(folder: Path, files: Manifest) -> None:
    """Compares files with their checksums.

    Raises:
        CheckpointError: names the first file that is damaged.
    """
    for name, (nbytes, right) in files.items():
        path, checksum = folder / name, 0
        with opened(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != nbytes:
                raise damaged(path, f"{nbytes} bytes", f"{size} bytes")
            while block := stream.read(_BLOCK_NBYTES):
                checksum = zlib.crc32(block, checksum)
        if checksum != right:
            raise damaged(path, f"CRC-32 {right:08x}", f"{checksum:08x}")


def verify(folder: Path | str) -> Manifest:
    """Reads every byte of a checkpoint and compares it with its checksums.

    Returns:
        Size and checksum of every file, by name.

    Raises:
        CheckpointError: names the first file that is missing or damaged, or there are no checksums.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if not manifest:
        what = "checksums, as `shardgrad.checkpoint.save` writes them"
        raise damaged(folder / MANIFEST, what, "none, as of other tools: it can only be loaded")
    check(folder, manifest)
    return manifest


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of the format, or a dtype; refuses everything else."""
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(
                f"{module}.{name} is not allowed in the metadata of a checkpoint"
            )
        return _CLASSES[module, name]


def read_metadata(folder: Path | str) -> Metadata:
    """Returns the metadata of a checkpoint of `torch.distributed.checkpoint`, such as ours.

    It is compared with its checksum, if there is one, before it is unpickled.

    Raises:
        CheckpointError: it is missing or damaged, would make objects of other classes, or names
            files that are not the checkpoint's.
    """
    path = Path(folder) / METADATA
    manifest = read_manifest(path.parent)
    if manifest:
        check(path.parent, {METADATA: manifest[METADATA]})
    with content_of(path, "metadata of a checkpoint") as content:
        found: Metadata = _Unpickler(io.BytesIO(content)).load()
        for name in {info.relative_path for info in found.storage_data.values()}:
            if not _is_name(name) or (manifest and name not in manifest):
                raise ValueError(f"{printable(name)} is not a file of the checkpoint")
        require_whole(found)
    return found


def require_whole(metadata: Metadata) -> None:
    """Checks that the parts of every tensor cover it: the rest would keep what it had before a
    load. torch's planner has checked that they do not overlap.

    Raises:
        ValueError: they do not.
    """
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            numel = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if numel != math.prod(stored.size):
                raise ValueError(
                    f"the parts on these ranks do not cover the tensor {printable(name)}: {numel} "
                    f"elements of {tuple(stored.size)}"
                )
