"""What programs see of flat memory: a DTensor for each parameter, gradient and piece of optimizer state."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["face_like", "in_own_storage"]


def in_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory that begins at the beginning of its storage.

    torch's `copy.deepcopy` fails on a DTensor whose local tensor begins elsewhere, and pickling one piece of
    a flat buffer saves all of it. The memory stays alive as long as either tensor. Version counters are
    separate. On the meta device, where there is no memory, the view itself is returned.
    """
    if view.device.type == "meta":
        return view
    begin = view.storage_offset() * view.itemsize
    storage = view.untyped_storage()[begin : begin + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride())


def face_like(local: torch.Tensor, param: DTensor) -> DTensor:
    """Returns the DTensor of which `local` is this rank's piece, cut as `param` is; dtypes may differ."""
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
