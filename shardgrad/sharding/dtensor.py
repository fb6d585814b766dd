"""DTensors over flat memory, which programs see as parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardgrad.errors import ForeignParameterError


def in_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory whose own storage begins where the tensor does.

    torch's `copy.deepcopy` fails on a DTensor whose local tensor begins elsewhere in its storage,
    and pickling one piece of a flat buffer saves the whole buffer. The memory stays alive as long
    as either tensor. Version counters are separate. Meta and fake tensors have no memory, and keep
    the view's storage.
    """
    if view.untyped_storage().device.type == "meta":
        return view.data
    begin = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[begin : begin + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(
        storage, 0, view.shape, view.stride()
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local tensor itself, not a view of it; another tensor as it is."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Returns the tensors' own storages.

    A DTensor's own storage has no memory. `param.data = dtensor` replaces it, but not the local
    tensor, which has the values.
    """
    with torch._C.DisableTorchFunction():  # DTensors answer twice as fast
        return list(map(torch.Tensor.untyped_storage, tensors))


def _with_spec(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns the DTensor whose local tensor is `local`; many may share one spec, as in torch.

    `DTensor.from_local` would move a local tensor on the host to the mesh's device.
    `DTensor.__init__` does nothing, but imports Dynamo and runs through it.
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def dtensor_over(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """Returns the DTensor whose local tensor is `local`.

    Args:
        local: this rank's piece, on the mesh's device or on the host.
        mesh: the mesh that the DTensor is sharded over.
        placements: on `mesh`.
        shape: global.
        stride: global.
    """
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return _with_spec(local, spec)


def dtensor_like(local: torch.Tensor, param: DTensor) -> DTensor:
    """Returns the DTensor with local tensor `local`, sharded as `param`; dtypes may differ."""
    if local.dtype == param.dtype:
        return _with_spec(local, param._spec)
    return dtensor_over(
        local, param.device_mesh, tuple(param.placements), param.shape, param.stride()
    )


def require_own_shards(tensors: Iterable[tuple[str, Any]]) -> None:
    """Refuses shards that another rank has saved.

    `torch.save` writes this rank's shard of a DTensor, and `torch.load` treats it as the reader's.
    The saved mesh still tells which rank wrote it.

    Args:
        tensors: names and values; values other than DTensors are ignored.

    Raises:
        ForeignParameterError: a shard of another rank was found.
    """
    for name, tensor in tensors:
        if not isinstance(tensor, DTensor) or not any(p.is_shard() for p in tensor.placements):
            continue
        own = dist.get_rank()
        coordinate = tensor.device_mesh.get_coordinate()
        saved_by = own if coordinate is None else int(tensor.device_mesh.mesh[tuple(coordinate)])
        if saved_by != own:
            raise ForeignParameterError(
                f"rank {own} loaded the shard of {name} that rank {saved_by} saved",
                expected="each rank's own shard",
                got=f"a file that torch.save wrote on rank {saved_by}",
                where=f"rank {own}, {name}",
                fix="torch.save on every rank, to its own file; or torch.distributed.checkpoint or "
                "shardgrad.checkpoint, which write one checkpoint for all ranks",
            )


def require_shards(tensors: Iterable[tuple[str, Any]]) -> None:
    """Refuses to load unsharded values into sharded parameters.

    Args:
        tensors: names of sharded parameters, and their values in a state dict.

    Raises:
        ForeignParameterError: a value is not a DTensor.
    """
    for name, tensor in tensors:
        if not isinstance(tensor, DTensor):
            raise ForeignParameterError(
                "an unsharded state dict was loaded into a sharded model",
                expected="the DTensors of a sharded model's state_dict()",
                got=f"{type(tensor).__name__} for {name}",
                where=f"load_state_dict on rank {dist.get_rank()}",
                fix="from torch.distributed.checkpoint.state_dict import StateDictOptions, "
                "set_model_state_dict; set_model_state_dict(model, full, "
                "options=StateDictOptions(full_state_dict=True))",
            )
