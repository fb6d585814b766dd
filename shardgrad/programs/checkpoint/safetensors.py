"""Unsharded models as `safetensors` files with the Hugging Face hub's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from shardgrad.errors import CheckpointError
from shardgrad.extras import require
from shardgrad.programs.checkpoint.files import sync, write_synced
from shardgrad.programs.checkpoint.folder import Publication
from shardgrad.programs.checkpoint.loading import load
from shardgrad.programs.checkpoint.manifest import verify
from shardgrad.programs.checkpoint.metadata import read_metadata
from shardgrad.programs.checkpoint.peers import Peers
from shardgrad.programs.text import listed, printable

__all__ = ["FILE_NBYTES", "export_checkpoint", "export_safetensors"]

FILE_NBYTES = 4 * 2**30


def export_safetensors(
    state: Mapping[str, torch.Tensor],
    folder: Path | str,
    *,
    file_nbytes: int = FILE_NBYTES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes an unsharded model as `model.safetensors`. A collective of all ranks of a group.

    With more than one file there is also `model.safetensors.index.json`, as `transformers` expects.

    Args:
        state: `model.state_dict()`. DTensors are gathered one after the other.
        folder: a new folder on the first rank's disk. It is created when all files are complete.
        file_nbytes: largest size of a file, unless a single tensor is larger.
        group: the ranks; None is the default group, or this process alone.

    Raises:
        PartnerUnavailableError: safetensors is not installed.
        CheckpointSaveError: the first rank could not write, or a rank has no memory for a tensor;
            on every rank.

    Host memory: one file on the first rank, one tensor on the others.
    """
    folder = Path(folder)
    peers = Peers(group, where=folder)
    sizes = {name: tensor.nbytes for name, tensor in state.items()}
    _write(sizes, lambda name: _whole(name, state[name], peers), folder, file_nbytes, peers)


def export_checkpoint(checkpoint: Path | str, folder: Path | str, *, only: str = "") -> None:
    """Verifies a checkpoint and writes its tensors as `safetensors` files, in one process.

    Args:
        checkpoint: a checkpoint that `shardgrad.checkpoint.save` wrote.
        folder: a new folder.
        only: write only the entries below this name, such as "model", without the name.

    Raises:
        PartnerUnavailableError: safetensors is not installed.
        CheckpointError: the checkpoint is damaged, or has no tensors below the name.
        CheckpointSaveError: the files could not be written.
    """
    require("safetensors", feature="a safetensors file")
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
            f"the checkpoint has no tensors below {printable(only)}",
            expected=f"one of {listed(groups)}",
            got=printable(only),
            where=printable(checkpoint),
            fix="choose one of these names",
        )
    itemsizes = {name: entry.properties.dtype.itemsize for name, entry in stored.items()}
    sizes = {name: entry.size.numel() * itemsizes[name] for name, entry in stored.items()}

    def read(name: str) -> torch.Tensor:
        tensor = torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
        load({prefix + name: tensor}, checkpoint, optional=("*",), verify=False)
        return tensor

    _write(sizes, read, Path(folder), FILE_NBYTES, Peers())


def _write(
    sizes: Mapping[str, int],
    read: Callable[[str], torch.Tensor],
    folder: Path,
    file_nbytes: int,
    peers: Peers,
) -> None:
    """Writes tensors one file after the other.

    Args:
        sizes: number of bytes of each tensor by name, in the order of the files.
        read: returns an unsharded tensor; every rank calls it for every name in the same order.
        folder: a new folder.
        file_nbytes: largest size of a file, unless a single tensor is larger.
        peers: the ranks. The first one writes.
    """
    require("safetensors", feature="a safetensors file")
    package = import_module("safetensors.torch")
    publication = Publication(folder)
    files = _named(sizes, file_nbytes)
    content: dict[str, torch.Tensor] = {}

    def leads(what: str, work: Callable[[], None]) -> None:
        # For each file all ranks continue or fail: a rank that stopped alone would leave others
        # in a gather.
        peers.together(what, lambda: work() if peers.leads else None)

    def copy(name: str, tensor: torch.Tensor) -> None:
        content[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def write(file: str) -> None:
        path = publication.aside / file
        package.save_file(content, path, metadata={"format": "pt"})
        # The package makes a file that only its owner reads; the folder has the umask's mode.
        path.chmod(publication.aside.stat().st_mode & 0o666)
        sync(path)
        content.clear()

    def finish() -> None:
        if len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            text = json.dumps(index, indent=2) + "\n"
            write_synced(publication.aside / "model.safetensors.index.json", text)
        publication.finish()

    leads("new folder", publication.begin)
    try:
        for file, names in files.items():
            for name in names:
                tensor = read(name)
                leads("copy", partial(copy, name, tensor))
            leads("writing", partial(write, file))
        leads("publication", finish)
    except BaseException:
        publication.abandon()  # no effect on ranks that have not begun it
        raise


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


def _whole(name: str, tensor: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Returns a tensor whole; a rank without room for it says so before others wait for it in the
    gather.
    """
    if not isinstance(tensor, DTensor):
        return tensor

    def reserve() -> None:
        # What the gather takes, twice the tensor's size, is left to the allocator.
        for_tensor = [
            torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(2)
        ]
        del for_tensor

    peers.together(f"room for {printable(name)}", reserve)
    return tensor.full_tensor()
