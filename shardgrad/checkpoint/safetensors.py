"""Exports unsharded models as `safetensors` files with the Hugging Face hub's file names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardgrad.checkpoint.files import write_synced
from shardgrad.checkpoint.peers import Peers
from shardgrad.checkpoint.publish import Publication
from shardgrad.checkpoint.text import printable
from shardgrad.extras import require

__all__ = ["FILE_NBYTES", "export_safetensors", "write_safetensors"]

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
        CheckpointSaveError: the first rank could not write, or a rank has no memory for a tensor; on every
            rank.

    Host memory: one file on the first rank, one tensor on the others.
    """
    peers = Peers(group)
    write_safetensors(
        {name: tensor.nbytes for name, tensor in state.items()},
        lambda name: _whole(name, state[name], peers),
        Path(folder),
        file_nbytes=file_nbytes,
        peers=peers,
    )


def write_safetensors(
    sizes: Mapping[str, int],
    read: Callable[[str], torch.Tensor],
    folder: Path,
    *,
    file_nbytes: int = FILE_NBYTES,
    peers: Peers,
) -> None:
    """Writes tensors one file after the other; see `export_safetensors`.

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
    peers.together("new folder", publication.begin if peers.leads else _nothing)
    files = _named(_filled(sizes, file_nbytes))
    try:
        for name, members in files.items():
            content = {}
            for member in members:
                tensor = read(member)
                copied = peers.together("copy", partial(_copied, tensor) if peers.leads else _nothing)
                if copied is not None:
                    content[member] = copied
            path = publication.aside / name
            # For each file all ranks continue or fail: a rank that stopped alone would leave others in a
            # gather.
            write = partial(package.save_file, content, path, metadata={"format": "pt"})
            peers.together("writing", write if content else _nothing)
        peers.together("publication", lambda: _finish(publication, files, sizes) if peers.leads else None)
    except BaseException:
        if peers.leads:
            publication.abandon()
        raise


def _finish(publication: Publication, files: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> None:
    if len(files) > 1:
        places = {member: name for name, members in files.items() for member in members}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_synced(publication.aside / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    publication.rename()


def _filled(sizes: Mapping[str, int], file_nbytes: int) -> list[list[str]]:
    """Returns the names in each file."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if files[-1] and filled + nbytes > file_nbytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += nbytes
    return files


def _named(files: Sequence[list[str]]) -> dict[str, list[str]]:
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    count = len(files)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(files, start=1)}


def _whole(name: str, tensor: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Returns a tensor whole; a rank without room for it says so before others wait for it in the gather."""
    if not isinstance(tensor, DTensor):
        return tensor
    peers.together(f"room for {printable(name)}", partial(_reserve, tensor))
    return tensor.full_tensor()


def _reserve(tensor: DTensor) -> None:
    """Reserves what gathering a tensor takes, twice its size, and leaves it to the allocator."""
    buffers = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(2)]
    del buffers


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _nothing() -> None:
    """The work of the other ranks while the first rank works."""
