"""A table of parameter addresses, for transports that read weights in place: RDMA, CUDA IPC, NCCL.

A piece of a parameter is a range of rows in the group's flat shard, which the optimizer updates in
place, so a registered address stays valid for the life of the model. Only replacing a parameter's
memory (`load_state_dict(assign=True)`, `model.to(dtype)`) moves it; a table made afterwards
compares unequal to the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.engine.param_group import UNSHARDED, FSDPParam, fsdp_param_of
from shardgrad.engine.unit import require_awake
from shardgrad.errors import MetaParameterError, UnsupportedParameterError
from shardgrad.features.root_of import root_of
from shardgrad.sharding.dtensor import local_of

# Prefixes that wrappers add to names. Names in checkpoints and of receivers do not have them.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class ExportedParameter:
    """One parameter, and this rank's part of it.

    Attributes:
        dtype: dtype of the memory.
        shape: global shape.
        dim: the sharded dim; 0 unless set by a `shard_placement_fn`.
        rows: half-open range of `dim` on this rank.
        data_ptr: address of the first row; the rows are contiguous.
        nbytes: size of the rows in bytes.
        holders: range of `dim` -> the ranks that have it, for the whole parameter.
        local: the rows, as a tensor over that memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    rows: tuple[int, int]
    data_ptr: int
    nbytes: int
    holders: Mapping[tuple[int, int], tuple[int, ...]]
    local: torch.Tensor = field(repr=False, compare=False)


def export_table(model: nn.Module) -> dict[str, ExportedParameter]:
    """Returns the address and rows of every parameter, by its name in a checkpoint.

    A tied parameter has one entry, under the first of its names. With `master="float32"` of
    `shardgrad.optim`, the memory is that of the bf16 weights, so nothing is cast or copied.

    For example, to register the memory with a transport once:

        for name, each in shardgrad.export_table(model).items():
            register(name, each.data_ptr, each.nbytes)

    Args:
        model: the root. Before its first forward, this call is a collective.

    Raises:
        RootError: not the root.
        AsleepError: the model sleeps at level 2 or 3.
        MetaParameterError: parameters are still on the meta device.
        UnsupportedParameterError: a parameter is a tensor subclass, is also sharded by tensor
            parallelism, or is neither sharded nor contiguous.
    """
    context = root_of(model, "export_table")
    require_awake(context.units)
    for each in context.units:
        # Not between a forward and its backward.
        if any(group.state is not UNSHARDED for group in each.groups):
            each.refresh()  # adopts parameters that the program has replaced
        for group in each.groups:
            group.take_writes()
    trainers = context.root.mesh.mesh.mesh.flatten().tolist()
    table = {}
    for name, param in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        managed = fsdp_param_of(param)
        row = _unsharded(name, param, trainers) if managed is None else _sharded(name, managed)
        if row.local.device.type == "meta":
            raise MetaParameterError(
                f"parameter {name} has no address yet",
                expected="parameters with data",
                got="a parameter on the meta device",
                fix="model.to_empty(device=...), and initialize it, first",
            )
        table[name] = row
    return table


def _sharded(name: str, managed: FSDPParam) -> ExportedParameter:
    group = managed.group
    if not group.is_flat or managed.sharding.came_as_dtensor:
        raise _unsupported(name, "an all-gather extension, or a DTensor of tensor parallelism")
    # The mesh's ranks as [replicas, shards], transposed. A mesh of replicas alone has one shard.
    ranks = group.mesh.mesh.mesh.reshape(-1, group.mesh.shard_size).T.tolist()
    piece = group.layout.pieces[group.params.index(managed)]
    dim, local = managed.sharding.dim, local_of(managed.sharded).detach()
    holders: dict[tuple[int, int], tuple[int, ...]] = {}
    for shard, having in enumerate(ranks):
        part = piece.rows(shard)  # several shards may have no rows
        holders[part] = (*holders.get(part, ()), *having)
    rows = piece.rows(group.mesh.shard_rank)
    return _row(tuple(managed.sharded.shape), dim, rows, holders, local)


def _unsharded(name: str, param: nn.Parameter, trainers: Sequence[int]) -> ExportedParameter:
    """Returns the entry of a parameter that no unit shards: each of the trainers has all of it."""
    if isinstance(param, DTensor) or not param.is_contiguous():
        raise _unsupported(name, "a DTensor or non-contiguous parameter that no unit shards")
    rows = (0, param.shape[0] if param.ndim else 1)
    return _row(tuple(param.shape), 0, rows, {rows: tuple(trainers)}, param.detach())


def _row(
    shape: tuple[int, ...],
    dim: int,
    rows: tuple[int, int],
    holders: Mapping[tuple[int, int], tuple[int, ...]],
    local: torch.Tensor,
) -> ExportedParameter:
    address, nbytes = local.data_ptr(), local.nbytes
    return ExportedParameter(local.dtype, shape, dim, rows, address, nbytes, holders, local)


def _unsupported(name: str, got: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        f"parameter {name} is not stored as a contiguous range of its rows",
        expected="a plain parameter that a unit shards, or that is contiguous",
        got=got,
        where=f"parameter {name}",
        fix="send its state_dict() entry",
    )
