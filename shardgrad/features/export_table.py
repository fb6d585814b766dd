"""Where every parameter lies, for those who read weights where they are: RDMA, CUDA IPC, NCCL.

A piece of a parameter is a range of rows in the group's flat shard, which the optimizer updates in
place, so an address that a receiver has registered once is right for the life of the model. Only a
program that puts other memory in a parameter's place (`load_state_dict(assign=True)`,
`model.to(dtype)`) moves it; a table made after that is not equal to the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.engine.param import FSDPParam, fsdp_param_of, local_of
from shardgrad.engine.param_group import group_of
from shardgrad.errors import MetaParameterError, UnsupportedParameterError
from shardgrad.features.root_of import root_of

__all__ = ["ExportedParameter", "export_table"]

# What wrappers put into names; Hugging Face's and a receiver's do not have it.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class ExportedParameter:
    """One parameter, and what this rank has of it.

    Attributes:
        dtype: of the memory.
        shape: global.
        dim: that is sharded; 0 unless a `shard_placement_fn` said otherwise.
        rows: half-open range of `dim` that this rank has.
        data_ptr: address of the first one; the rows lie one after the other, without gaps.
        nbytes: of them.
        holders: range of `dim` -> the ranks that have it, for all of the parameter.
        local: the rows as a tensor over that memory.
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
    """Returns where every parameter lies, by the name that a checkpoint has for it.

    A tied parameter is there once, under the first of its names. Under `master="float32"` of
    `shardgrad.optim` the memory is that of the bf16 weights, so that nothing is cast or copied.

    For example what a transport registers once:

        for name, each in shardgrad.export_table(model).items():
            register(name, each.data_ptr, each.nbytes)

    Args:
        model: the root. Before its first forward every rank has to make this call.

    Raises:
        RootError: not the root.
        AsleepError: the model sleeps, at level 2 or 3.
        MetaParameterError: parameters are still on the meta device.
        UnsupportedParameterError: one is a tensor subclass, is sharded by others too, or is not
            sharded and not contiguous.
    """
    context = root_of(model, "export_table")
    context.require_awake()
    for each in context.units:
        if not each.is_unsharded:  # between a forward and its backward nothing changes places
            each.refresh()  # takes over what a program has put in a parameter's place
    table = {}
    for name, param in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        managed = fsdp_param_of(param)
        row = _unsharded(name, param) if managed is None else _sharded(name, managed)
        if row.local.device.type == "meta":
            raise MetaParameterError(
                f"parameter {name} has no address yet",
                expected="parameters with data",
                got="one on the meta device",
                fix="model.to_empty(device=...) and initialise it first",
            )
        table[name] = row
    return table


def _sharded(name: str, managed: FSDPParam) -> ExportedParameter:
    group = group_of(managed)
    if not group.is_flat or managed.sharding.came_as_dtensor:
        raise _unsupported(name, "an all-gather extension, or a DTensor of tensor parallelism")
    # Of ranks in replicas x shards; a mesh of replicas alone has one shard.
    ranks = group.mesh.mesh.mesh.reshape(-1, group.mesh.shard_size).T.tolist()
    piece = group.layout.pieces[group.params.index(managed)]
    dim, local = managed.sharding.dim, local_of(managed.sharded).detach()
    holders = {piece.rows(shard): tuple(having) for shard, having in enumerate(ranks)}
    rows = piece.rows(group.mesh.shard_rank)
    return _row(managed.shape, dim, rows, holders, local)


def _unsharded(name: str, param: nn.Parameter) -> ExportedParameter:
    """Returns the row of a parameter that no unit shards: every rank has all of it."""
    if isinstance(param, DTensor) or not param.is_contiguous():
        raise _unsupported(name, "not sharded by a unit, and a DTensor or with gaps")
    rows = (0, param.shape[0] if param.ndim else 1)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return _row(tuple(param.shape), 0, rows, {rows: tuple(range(world))}, param.detach())


def _row(
    shape: tuple[int, ...],
    dim: int,
    rows: tuple[int, int],
    holders: Mapping[tuple[int, int], tuple[int, ...]],
    local: torch.Tensor,
) -> ExportedParameter:
    address = 0 if local.device.type == "meta" else local.data_ptr()
    nbytes = local.numel() * local.itemsize
    return ExportedParameter(local.dtype, shape, dim, rows, address, nbytes, holders, local)


def _unsupported(name: str, got: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        f"parameter {name} does not lie in memory as a range of its rows",
        expected="a plain parameter, sharded by a unit or contiguous",
        got=got,
        where=f"parameter {name}",
        fix="send it by its state_dict() entry",
    )
