"""A multi-tensor Adam launch, with the conditions and the gaps that the CUDA ones have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Lists = Sequence[Sequence[Tensor]]


def launch(lists: Lists, *, takes_empty: bool) -> Lists:
    """Checks what every launch checks, and returns what it works on.

    A launch is issued when the last chunk of the last tensor is reached. Without `takes_empty`, an
    empty last tensor has no chunk, so nothing is issued at all: the silent skip of
    TransformerEngine #3207.
    """
    for tensors in lists:
        if len(tensors) != len(lists[0]):
            raise RuntimeError("tensor lists differ in length")
        for tensor, first in zip(tensors, lists[0], strict=True):
            if isinstance(tensor, DTensor):
                raise RuntimeError("a DTensor has no address")
            if not tensor.is_contiguous() or tensor.numel() != first.numel():
                raise RuntimeError("a tensor is not contiguous, or has another size")
    if takes_empty:
        keep = [i for i, tensor in enumerate(lists[0]) if tensor.numel()]
        return [[tensors[i] for i in keep] for tensors in lists]
    return [[] for _ in lists] if lists[0][-1].numel() == 0 else lists


def require_one_dtype(tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raises as TransformerEngine's kernels do."""
    for i, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            raise RuntimeError(f"tensor {i} has dtype={tensor.dtype}, but expected dtype={dtype}")


def adam(
    lists: Lists,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int | Tensor,
    *,
    decoupled: bool,
    bias_correction: bool,
    weight_decay: float,
    inverse_scale: Tensor | None = None,
) -> None:
    """Updates `lists`: gradients, parameters, two moments, perhaps masters. Computes in float32.

    With `inverse_scale` (the capturable kernels) gradients are multiplied by it and written back.
    """
    beta1, beta2 = betas
    for grad, param, exp_avg, exp_avg_sq, *master in zip(*lists, strict=True):
        g = grad.float()
        if inverse_scale is not None:
            g = g * inverse_scale
            grad.copy_(g)
        p = master[0].float() if master else param.float()
        if not decoupled:
            g = g + weight_decay * p
        m = beta1 * exp_avg.float() + (1 - beta1) * g
        v = beta2 * exp_avg_sq.float() + (1 - beta2) * g * g
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
        count = float(step) if bias_correction else float("inf")
        m_hat, v_hat = m / (1 - beta1**count), v / (1 - beta2**count)
        update = m_hat / (v_hat.sqrt() + eps) + (weight_decay * p if decoupled else 0.0)
        p = p - lr * update
        if master:
            master[0].copy_(p)
        param.copy_(p)
