"""The tensors of a checkpoint as `safetensors` files with the Hugging Face hub's names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardgrad.errors import CheckpointError, OptionError
from shardgrad.programs.checkpoint.contents import read_metadata, verify
from shardgrad.programs.checkpoint.files import sync, write_synced
from shardgrad.programs.checkpoint.folder import published
from shardgrad.programs.checkpoint.loading import read
from shardgrad.programs.extras import require
from shardgrad.programs.text import listed, printable


def export_checkpoint(
    checkpoint: Path | str, folder: Path | str, *, only: str = "", file_nbytes: int = 4 * 2**30
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
        OptionError: `file_nbytes` is not positive.
        PartnerUnavailableError: safetensors is not installed.
        CheckpointError: the checkpoint is damaged, or has no tensors below the name.
        CheckpointError: the files could not be written.
    """
    if not (isinstance(file_nbytes, int | float) and file_nbytes > 0):
        raise OptionError(
            "file_nbytes must be positive",
            expected="a number of bytes",
            got=repr(file_nbytes),
            fix="file_nbytes=4 * 2**30",
        )
    require("safetensors", feature="a safetensors file")
    from safetensors.torch import save_file

    checkpoint, folder = Path(checkpoint), Path(folder)
    verify(checkpoint)
    metadata = read_metadata(checkpoint)
    prefix = f"{only}." if only else ""
    tensors = {
        name.removeprefix(prefix): torch.empty(
            entry.size, dtype=entry.properties.dtype, device="meta"
        )
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    if not tensors:
        groups = {name.partition(".")[0] for name in metadata.state_dict_metadata}
        raise CheckpointError(
            f"the checkpoint has no tensors under {printable(only)}",
            expected=f"one of {listed(groups)}",
            got=printable(only),
            where=printable(checkpoint),
            fix="choose one of these names",
        )
    parts: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > file_nbytes:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += tensor.nbytes
    files: dict[str, str] = {}
    try:
        with published(folder) as aside:
            for number, part in enumerate(parts, start=1):
                file = "model.safetensors"
                if len(parts) > 1:
                    file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
                files |= dict.fromkeys(part, file)
                content = {name: torch.empty_like(part[name], device="cpu") for name in part}
                read({prefix + name: content[name] for name in part}, checkpoint, metadata)
                save_file(content, aside / file, metadata={"format": "pt"})
                # The package makes a file that only its owner reads; the folder has the umask's
                # mode.
                (aside / file).chmod(aside.stat().st_mode & 0o666)
                sync(aside / file)
            if len(parts) > 1:
                nbytes = sum(tensor.nbytes for tensor in tensors.values())
                index = {"metadata": {"total_size": nbytes}, "weight_map": files}
                write_synced(aside / "model.safetensors.index.json", json.dumps(index, indent=2))
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
