"""Which parameters can be sharded, and which of them are sent as bytes.

Integers, booleans and float8 have no gradients. They are sharded, gathered and copied out as bytes:
their shards and messages have dtype uint8. A parameter of shape (rows, ...) is stored as (rows,
..., bytes per element), which `Shard(0)` splits between elements.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.errors import DeviceError, UnsupportedParameterError
from shardgrad.sharding.dtensor import local_of
from shardgrad.sharding.mesh import DataParallelMesh

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_AS_BYTES = frozenset(getattr(torch, name) for name in (*_INTEGERS, *_FLOAT8))


def travels_as_bytes(dtype: torch.dtype) -> bool:
    """Returns whether parameters of this dtype are sent as bytes and never get gradients."""
    return dtype in _AS_BYTES


def from_bytes(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a view of stored bytes in `dtype`; `stored` itself if it is not sent as bytes."""
    return stored.view(dtype).squeeze(-1) if travels_as_bytes(dtype) else stored


def require_shardable(name: str, param: nn.Parameter, owner: nn.Module) -> None:
    """Refuses a parameter of `owner` that cannot be sharded.

    Raises:
        UnsupportedParameterError: by its shape, layout, dtype or owner.
    """
    where = f"parameter {name}"
    if isinstance(owner, torch.jit.ScriptModule):
        raise UnsupportedParameterError(
            f"fully_shard cannot shard {name}, which is in TorchScript",
            expected="a module of Python",
            got=type(owner).__name__,
            where=where,
            fix="torch.compile instead of torch.jit, or pass it in ignored_params",
        )
    if param.ndim == 0:
        raise UnsupportedParameterError(
            f"fully_shard doesn't support scalar parameters. Change {name} to a 1D tensor with "
            "numel equal to 1.",
            expected="at least one dimension to shard",
            got="a 0-dimensional tensor",
            where=where,
            fix=f"self.{name.rpartition('.')[2]} = nn.Parameter(torch.tensor([value]))",
        )
    local = local_of(param)
    if local.layout is not torch.strided or not local.is_contiguous():
        raise UnsupportedParameterError(
            f"FSDP does not support non-contiguous parameters yet: {name}",
            expected="a contiguous, dense tensor",
            got=f"shape {tuple(param.shape)}, layout {param.layout}",
            where=where,
            fix="param.data = param.data.contiguous() before fully_shard",
        )
    if param.dtype in DTYPES or (travels_as_bytes(param.dtype) and not param.requires_grad):
        return
    raise UnsupportedParameterError(
        f"fully_shard cannot reduce gradients of {name} in {param.dtype}",
        expected=", ".join(map(str, DTYPES))
        + "; or integers, booleans and float8 without gradients",
        got=f"{param.dtype}, requires_grad={param.requires_grad}",
        where=where,
        fix="requires_grad=False, or pass it in ignored_params",
    )


def require_one_device(params: Mapping[nn.Parameter, str], mesh: DataParallelMesh) -> None:
    """Refuses parameters of one unit on several devices, or on a device other than the mesh's.

    Raises:
        DeviceError: names the parameters.
    """
    first: dict[torch.device, str] = {}
    for param, name in params.items():
        if isinstance(param, DTensor) and param.device_mesh.device_type != mesh.device.type:
            raise DeviceError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh",
                expected=f"a mesh over {mesh.device.type}",
                got=f"a mesh over {param.device_mesh.device_type}",
                where=f"parameter {name}",
                fix=f"init_device_mesh('{mesh.device.type}', ...) for tensor parallelism too",
            )
        first.setdefault(param.device, name)
    if len(first) > 1:
        raise DeviceError(
            "parameters of one unit are on several devices",
            expected=f"all on {mesh.device}, or all on meta",
            got=", ".join(f"{name} on {device}" for device, name in first.items()),
            fix=f"module.to('{mesh.device}') before fully_shard",
        )
    for device, name in first.items():
        if device.type not in (mesh.device.type, "cpu", "meta"):
            raise DeviceError(
                f"parameter {name} is on a device that the mesh does not have",
                expected=str(mesh.device),
                got=str(device),
                where=f"parameter {name}",
                fix=f"module.to('{mesh.device}') before fully_shard, or a mesh over "
                f"'{device.type}'",
            )
