"""The metadata of torch's format, unpickled into classes of the format and nothing else."""

from __future__ import annotations

import io
import math
import pathlib
import pickle
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardgrad.programs.checkpoint.files import content_of, damaged
from shardgrad.programs.checkpoint.manifest import Manifest, is_name
from shardgrad.programs.text import printable

METADATA = ".metadata"
_MOST_NBYTES = 2**30
_CLASSES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,  # the path that torch wrote to
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    # Python 3.11.0 to 3.11.3 pickles a member of an enum as getattr(the enum, its name).
    ("builtins", "getattr"): lambda _, name: metadata._MEM_FORMAT_ENCODING[name],
    **{
        (made.__module__, made.__name__): made
        for made in (
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.StorageMeta,
            metadata.TensorProperties,
            metadata.TensorStorageMetadata,
            metadata._MEM_FORMAT_ENCODING,
            filesystem._StorageInfo,
        )
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns a class of the format, or a dtype; refuses everything else."""
        found = _CLASSES.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(
                f"{module}.{name} is not allowed in the metadata of a checkpoint"
            )
        return found


def read_metadata(folder: Path | str, manifest: Manifest | None = None) -> Metadata:
    """Returns the metadata of a checkpoint of `torch.distributed.checkpoint`, such as ours.

    Args:
        folder: folder of the checkpoint.
        manifest: checksums; the file is compared with its own before it is unpickled, and may name
            no other files then.

    Raises:
        CheckpointError: it is missing or damaged, would make objects of other classes, or names
            files that are not the checkpoint's.
    """
    path = Path(folder) / METADATA
    content = content_of(path, _MOST_NBYTES)
    if manifest:
        right = manifest.get(METADATA)
        if right != (len(content), zlib.crc32(content)):
            raise damaged(path, "the checksum in the manifest", "another checksum")
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        for info in found.storage_data.values():
            name = info.relative_path
            if not is_name(name) or (manifest and name not in manifest):
                raise ValueError(f"{printable(name)} is not a file of the checkpoint")
        require_whole(found)
    except Exception as error:  # a damaged pickle raises whatever its bytes spell
        raise damaged(
            path, "metadata of a checkpoint", f"{type(error).__name__}: {error}"
        ) from error
    metadata: Metadata = found
    return metadata


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
