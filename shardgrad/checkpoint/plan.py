"""Which rank writes which part of a state, so that every part is written once."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardgrad.checkpoint.boxes import Box
from shardgrad.checkpoint.index import DTYPES
from shardgrad.checkpoint.text import printable
from shardgrad.checkpoint.tree import Value, flatten
from shardgrad.errors import CheckpointError

__all__ = ["Holding", "Part", "holdings", "my_part"]


@dataclass(frozen=True)
class Holding:
    """The part of a tensor that this rank holds.

    Attributes:
        shape: global shape of the tensor.
        box: region of the local part.
        local: the local part; memory of the model or optimizer, not a copy.
        tensor: the tensor in the state, a DTensor or `local`.
    """

    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor
    tensor: torch.Tensor


@dataclass(frozen=True)
class Part:
    """What one rank writes.

    Attributes:
        tensors: local parts by name, including those without elements.
        values: values that are not tensors, by name.
    """

    tensors: Mapping[str, Holding]
    values: Mapping[str, Value]

    def copied(self) -> Part:
        """Returns the same with copies of the tensors on the host."""
        copies = {}
        for name, held in self.tensors.items():
            copy = torch.empty(held.local.shape, dtype=held.local.dtype)
            copies[name] = Holding(held.shape, held.box, copy.copy_(held.local.detach()), copy)
        return Part(copies, self.values)


def holdings(state: Mapping[Any, Any]) -> tuple[dict[str, Holding], dict[str, Value]]:
    """Returns the local parts of tensors, and the other values, in a nested state.

    Raises:
        CheckpointError: the state has an entry that cannot be saved or loaded.
    """
    tensors, values = {}, {}
    for name, leaf in flatten(state).items():
        if isinstance(leaf, torch.Tensor):
            tensors[name] = _holding(name, leaf)
        else:
            values[name] = leaf
    return tensors, values


def my_part(
    leaves: Mapping[str, torch.Tensor | Value], plain: Mapping[str, int], rank: int
) -> Part:
    """Returns what this rank writes.

    One of the replicas of a DTensor's shard writes it. Which one depends on the name, so that the
    replicas share the work without communication.

    Args:
        leaves: leaves of the state on this rank, by name.
        plain: which rank writes each leaf that is not a DTensor.
        rank: this rank.

    Raises:
        CheckpointError: the state has an entry that cannot be saved, also if another rank would
            write it.
    """
    tensors, values = {}, {}
    for name, leaf in leaves.items():
        is_mine = _is_writer(name, leaf) if isinstance(leaf, DTensor) else plain[name] == rank
        if isinstance(leaf, torch.Tensor):
            held = _holding(name, leaf)
            if is_mine:
                tensors[name] = held
        elif is_mine:
            values[name] = leaf
    return Part(tensors, values)


def _is_writer(name: str, tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    turn = zlib.crc32(name.encode())
    replicas = [
        d for d, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)
    ]
    return all(coordinate[d] == turn % tensor.device_mesh.size(d) for d in replicas)


def _holding(name: str, tensor: torch.Tensor) -> Holding:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        _refuse_unusual(name, tensor)
        return Holding(shape, Box.whole(shape), tensor, tensor)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise _unusual(name, "partial sums, which no rank holds the total of")
    local = tensor.to_local()
    _refuse_unusual(name, local)
    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Holding(shape, Box(tuple(offset), tuple(size)), local, tensor)


def _refuse_unusual(name: str, local: torch.Tensor) -> None:
    """Checks that a tensor is dense, has memory and a supported dtype."""
    if local.layout is not torch.strided or local.dtype not in DTYPES.values():
        raise _unusual(name, f"a {local.layout} tensor of {local.dtype}")
    if local.is_meta:
        raise _unusual(name, "a tensor on the meta device")
    is_wrapper: bool = is_traceable_wrapper_subclass(local)
    if is_wrapper:
        raise _unusual(name, "a tensor of a class that keeps its bytes in other tensors")


def _unusual(name: str, got: str) -> CheckpointError:
    return CheckpointError(
        "a tensor that cannot be in a checkpoint",
        expected="a dense tensor of a plain dtype, sharded or replicated",
        got=got,
        where=printable(name),
        fix="convert it, or leave it out of the state",
    )
