"""What programs see of flat memory: a DTensor for each parameter, gradient and piece of optimizer state."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["dtensor_like", "dtensor_over", "in_own_storage"]


def in_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory that begins at the beginning of its storage.

    torch's `copy.deepcopy` fails on a DTensor whose local tensor begins elsewhere, and pickling one piece of
    a flat buffer saves all of it. The memory stays alive as long as either tensor. Version counters are
    separate. Where there is no memory (meta and fake tensors), the view itself is returned.
    """
    if view.untyped_storage().device.type == "meta":
        return view
    begin = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[begin : begin + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


def dtensor_over(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """Returns the DTensor of which `local` is this rank's piece.

    Args:
        local: the piece, as the placements shard it; on the mesh's device or on the host.
        mesh: where it is sharded.
        placements: on `mesh`.
        shape: global.
        stride: global.
    """
    meta = TensorMeta(shape, stride, local.dtype)
    # Not `DTensor.from_local`, which moves a local tensor that lives on the host to the mesh's device.
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def dtensor_like(local: torch.Tensor, param: DTensor) -> DTensor:
    """Returns the DTensor of which `local` is this rank's piece, sharded as `param` is; dtypes may differ."""
    return dtensor_over(local, param.device_mesh, tuple(param.placements), param.shape, param.stride())
