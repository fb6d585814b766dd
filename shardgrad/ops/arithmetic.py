"""The dtype of arithmetic in the references, and their division."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns the dtype of arithmetic on `tensors`: float64 if one of them is float64, else
    float32.
    """
    return (
        torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    )


def divide_(value: Tensor, divisor: float) -> None:
    """Divides in place; a true division, rounded once."""
    # Divide by a tensor on the same device: for a Python number, CUDA multiplies by the reciprocal,
    # which rounds twice.
    if divisor != 1:
        value.div_(torch.full((), divisor, dtype=value.dtype, device=value.device))
