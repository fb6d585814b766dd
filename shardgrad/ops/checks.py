"""Argument checks of the references; csrc/checks.cpp has those of the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check_data", "check_memory", "check_scalar", "compute_dtype", "divide_"]

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def check_data(name: str, tensors: Sequence[Tensor], target: Tensor) -> None:
    """Refuses tensors of another dtype or device than the ops take, and those without their memory.

    Args:
        name: what the caller knows the tensors as.
        tensors: data that a kernel is about to read or write.
        target: a tensor on the device where they must be.

    Raises:
        RuntimeError: a tensor breaks one of the rules.
    """
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise RuntimeError(f"{name} must be float32, bfloat16, float16 or float64")
        check_memory(name, tensor, target)


def check_memory(name: str, tensor: Tensor, target: Tensor) -> None:
    """Refuses a tensor of any dtype that is on another device, not contiguous, or without its
    memory.

    Raises:
        RuntimeError: the tensor breaks one of the rules.
    """
    if tensor.device != target.device:
        raise RuntimeError(f"{name} must be on the device of the tensor written to")
    if not tensor.is_contiguous():
        raise RuntimeError(f"{name} must be contiguous")
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    if tensor.numel() > 0 and end > tensor.untyped_storage().nbytes():
        raise RuntimeError(f"{name} lies in a storage that was freed or shrunk")


def check_scalar(
    name: str, tensor: Tensor | None, dtypes: Sequence[torch.dtype], target: Tensor
) -> None:
    """Refuses an optional tensor that is not one number of one of `dtypes`.

    Raises:
        RuntimeError: the tensor breaks one of the rules.
    """
    if tensor is None:
        return
    if tensor.dtype not in dtypes or tensor.numel() != 1:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise RuntimeError(f"{name} must be {allowed} with 1 element")
    check_memory(name, tensor, target)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns what arithmetic on `tensors` runs in: float64 if one of them is, else float32."""
    return (
        torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    )


def divide_(value: Tensor, divisor: float) -> None:
    """Divides in place; a true division, rounded once."""
    # By a tensor on the same device: given a number, CUDA multiplies by the reciprocal, which
    # rounds twice.
    if divisor != 1:
        value.div_(torch.full((), divisor, dtype=value.dtype, device=value.device))
