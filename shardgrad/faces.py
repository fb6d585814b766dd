"""What programs see of flat memory: a DTensor for each parameter, gradient and piece of optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .mesh import DataParallelMesh

__all__ = ["face_over", "in_own_storage"]


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


def face_over(
    local: torch.Tensor, mesh: DataParallelMesh, shape: Sequence[int], stride: Sequence[int] | None = None
) -> DTensor:
    """Returns the DTensor of which `local` is this rank's piece.

    Args:
        local: the piece, as the mesh's placements cut it; on the mesh's device or on the host.
        mesh: where it is sharded.
        shape: of the whole.
        stride: of the whole; None for a contiguous one.
    """
    if stride is None:
        stride = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    # Not `DTensor.from_local`, which moves a local tensor that lives on the host to the mesh's device.
    return DTensor(local, DTensorSpec(mesh.mesh, mesh.placements, tensor_meta=meta), requires_grad=False)
