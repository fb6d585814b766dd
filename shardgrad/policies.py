"""Policies: torch's own, and its handle, re-exported so that one import serves both engines; and ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "GradientPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
]

# None where the installed torch does not have it yet.
DataParallelMeshDims = getattr(torch_fsdp, "DataParallelMeshDims", None)


@dataclass(frozen=True)
class GradientPolicy:
    """Where reduced gradients live and in which dtype.

    Attributes:
        dtype: dtype of the persistent gradient shard; None means the dtype of the sharded parameter.
        decoupled: bind the gradient to `param.decoupled_grad` instead of `param.grad`, for optimizers that
            read a gradient whose dtype differs from the parameter's.
    """

    dtype: torch.dtype | None = None
    decoupled: bool = False

    @property
    def attribute(self) -> str:
        """Name of the parameter attribute that holds the gradient."""
        return "decoupled_grad" if self.decoupled else "grad"
