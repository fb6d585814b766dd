"""Unsharded models as `safetensors` files with the Hugging Face hub's names: written, and read in
parts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardgrad.checkpoint.boxes import Box, row_runs
from shardgrad.checkpoint.files import content_of, open_plain, write_synced
from shardgrad.checkpoint.index import DTYPES, MOST_NBYTES, Entry, Piece
from shardgrad.checkpoint.peers import Peers
from shardgrad.checkpoint.publish import Publication
from shardgrad.checkpoint.source import Source
from shardgrad.checkpoint.text import printable
from shardgrad.errors import CheckpointError
from shardgrad.extras import require

__all__ = ["FILE_NBYTES", "SafetensorsSource", "export_safetensors", "write_safetensors"]

FILE_NBYTES = 4 * 2**30
ONE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_RUN_NBYTES = 4 * 2**20  # copied at once


class SafetensorsSource(Source):
    """The weights of a model in `safetensors` files, as `transformers` writes them.

    The format has no checksums: sizes are checked, contents are not.

    Args:
        folder: folder of `model.safetensors`, or of `model.safetensors.index.json` and the files it
            names.

    Raises:
        PartnerUnavailableError: safetensors is not installed.
        CheckpointError: a file is missing, or is none of this format.
    """

    origin = "safetensors"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        require("safetensors", feature="a safetensors file")
        self.folder = folder
        self.values = {}
        self._files: dict[str, Any] = {}
        tensors: dict[str, Entry] = {}
        package, described = import_module("safetensors"), []
        for file in _files_in(folder):
            path = folder / file
            try:
                os.close(open_plain(path))
                opened = self._exits.enter_context(package.safe_open(path, framework="pt"))
                for name in opened.keys():  # noqa: SIM118  (not a dictionary)
                    part = opened.get_slice(name)
                    shape = tuple(part.get_shape())
                    dtype = _dtype_of(part.get_dtype())
                    piece = Piece(file, 0, Box.whole(shape), ())
                    tensors[name] = Entry(dtype, shape, (piece,) if piece.box.numel else ())
                    self._files[name] = opened
                    described.append((name, shape, str(dtype)))
            except (package.SafetensorError, KeyError, OSError) as error:
                self._exits.close()
                raise _unusable(path, f"{type(error).__name__}: {error}") from error
        self.tensors = tensors
        self.identity = hashlib.sha256(repr(sorted(described)).encode()).hexdigest()

    def check(self, name: str, box: Box) -> None:
        """No effect: there are no checksums."""

    def fill(self, name: str, box: Box, into: torch.Tensor) -> None:
        """Copies a region, some rows at a time."""
        entry, part, target = self.tensors[name], self._files[name].get_slice(name), into.detach()
        for run, _, _ in row_runs(box, entry.shape, _RUN_NBYTES // entry.dtype.itemsize):
            if run.shape:
                target[run.seen_from(box).slices()].copy_(part[run.slices()])
            else:
                target.copy_(self._files[name].get_tensor(name))


def _files_in(folder: Path) -> list[str]:
    if not (folder / INDEX_FILE).exists():
        return [ONE_FILE]
    try:
        places = json.loads(content_of(folder / INDEX_FILE, MOST_NBYTES))["weight_map"]
        names = sorted({str(name) for name in places.values()})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(folder / INDEX_FILE, f"{type(error).__name__}: {error}") from error
    for name in names:
        if Path(name).name != name:
            raise _unusable(
                folder / INDEX_FILE,
                f"the name {name!r:.100}, which is not of a file in the same folder",
            )
    return names


def _dtype_of(name: str) -> torch.dtype:
    """Returns the dtype that the format calls F32, BF16, I64 and so on."""
    names = {
        "BOOL": "bool",
        "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
    }
    kinds = {"F": "float", "I": "int", "U": "uint"}
    full = names.get(name) or kinds[name[0]] + name[1:]
    return DTYPES[full]


def _unusable(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        "a file of weights cannot be used",
        expected="a file in the format safetensors",
        got=printable(got),
        where=printable(path),
        fix="correct the path, or write the file again",
    )


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
                copied = peers.together(
                    "copy", partial(_copied, tensor) if peers.leads else _nothing
                )
                if copied is not None:
                    content[member] = copied
            path = publication.aside / name
            # For each file all ranks continue or fail: a rank that stopped alone would leave others
            # in a gather.
            write = partial(package.save_file, content, path, metadata={"format": "pt"})
            peers.together("writing", write if content else _nothing)
        peers.together(
            "publication", lambda: _finish(publication, files, sizes) if peers.leads else None
        )
    except BaseException:
        if peers.leads:
            publication.abandon()
        raise


def _finish(
    publication: Publication, files: Mapping[str, Sequence[str]], sizes: Mapping[str, int]
) -> None:
    if len(files) > 1:
        places = {member: name for name, members in files.items() for member in members}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_synced(publication.aside / INDEX_FILE, json.dumps(index, indent=2) + "\n")
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
        return {ONE_FILE: files[0]}
    count = len(files)
    return {
        f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(files, start=1)
    }


def _whole(name: str, tensor: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Returns a tensor whole; a rank without room for it says so before others wait for it in the
    gather.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    peers.together(f"room for {printable(name)}", partial(_reserve, tensor))
    return tensor.full_tensor()


def _reserve(tensor: DTensor) -> None:
    """Reserves what gathering a tensor takes, twice its size, and leaves it to the allocator."""
    buffers = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for _ in range(2)
    ]
    del buffers


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _nothing() -> None:
    """The work of the other ranks while the first rank works."""
