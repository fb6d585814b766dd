"""What raises on purpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Trap", "TrapInBackward"]


class Trap(Exception):
    """Raised on purpose."""


class TrapInBackward(torch.autograd.Function):
    """Passes its input on, and raises when the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Trap("backward")
