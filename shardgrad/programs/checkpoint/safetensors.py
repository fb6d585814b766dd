"""The tensors of a checkpoint as `safetensors` files with the Hugging Face hub's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardgrad.errors import CheckpointError
from shardgrad.extras import require
from shardgrad.programs.checkpoint.files import sync, write_synced
from shardgrad.programs.checkpoint.folder import published
from shardgrad.programs.checkpoint.loading import read
from shardgrad.programs.checkpoint.manifest import verify
from shardgrad.programs.checkpoint.metadata import read_metadata
from shardgrad.programs.text import listed, printable

FILE_NBYTES = 4 * 2**30


def export_checkpoint(
    checkpoint: Path | str, folder: Path | str, *, only: str = "", file_nbytes: int = FILE_NBYTES
) -> None:
    """Verifies a checkpoint and writes its tensors as `model.safetensors`, in one process.

    With more than one file there is also `model.safetensors.index.json`, as `transformers` expects.

    Args:
        checkpoint: a checkpoint that `shardgrad.checkpoint.save` wrote.
        folder: a new folder. It is created when all files are complete.
        only: write only the entries below this name, such as "model", without the name.
        file_nbytes: largest size of a file, unless a single tensor is larger; as much host memory
            is needed.

    Raises:
        PartnerUnavailableError: safetensors is not installed.
        CheckpointError: the checkpoint is damaged, or has no tensors below the name.
        CheckpointError: the files could not be written.
    """
    require("safetensors", feature="a safetensors file")
    checkpoint, folder = Path(checkpoint), Path(folder)
    metadata = read_metadata(checkpoint, verify(checkpoint))
    prefix = f"{only}." if only else ""
    stored = {
        name.removeprefix(prefix): entry
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    if not stored:
        groups = {name.partition(".")[0] for name in metadata.state_dict_metadata}
        raise CheckpointError(
            f"the checkpoint has no tensors under {printable(only)}",
            expected=f"one of {listed(groups)}",
            got=printable(only),
            where=printable(checkpoint),
            fix="choose one of these names",
        )
    sizes = {
        name: entry.size.numel() * entry.properties.dtype.itemsize for name, entry in stored.items()
    }
    files = _named(sizes, file_nbytes)
    try:
        with published(folder) as aside:
            for file, names in files.items():
                content = {
                    name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
                    for name in names
                }
                read({prefix + name: content[name] for name in names}, checkpoint, metadata)
                import_module("safetensors.torch").save_file(
                    content, aside / file, metadata={"format": "pt"}
                )
                # The package makes a file that only its owner reads; the folder has the umask's
                # mode.
                (aside / file).chmod(aside.stat().st_mode & 0o666)
                sync(aside / file)
            if len(files) > 1:
                places = {name: file for file, names in files.items() for name in names}
                index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
                path = aside / "model.safetensors.index.json"
                write_synced(path, json.dumps(index, indent=2) + "\n")
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            "the weights could not be written",
            expected="no error",
            got=printable(f"{type(error).__name__}: {error}"),
            where=printable(folder),
            fix="remove the cause, and try again",
        ) from error


def _named(sizes: Mapping[str, int], file_nbytes: int) -> dict[str, list[str]]:
    """Returns the names of the tensors in each file."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if files[-1] and filled + nbytes > file_nbytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += nbytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    count = len(files)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(files, 1)}
