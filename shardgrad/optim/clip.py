"""Clipping gradients by their norm, without a host read."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from shardgrad.engine.tracing import outside_graphs
from shardgrad.errors import GradientError, OptionError
from shardgrad.optim.norms import norm_of
from shardgrad.optim.selection import select


@torch.no_grad()
@outside_graphs
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | torch.Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales gradients so that their norm over all ranks is at most `max_norm`.

    Multiplies gradients in place by `min(1, max_norm / (norm + 1e-6))`, as
    `torch.nn.utils.clip_grad_norm_` does. If a gradient is not finite, the optimizers of
    `shardgrad.optim` skip their next step. (The flag is stored with the gradient shards: an
    optimizer over a model without units needs `check_finite=True`.)

    For example, between backward and the optimizer step:

        norm = shardgrad.clip_grad_norm_(model, 1.0)

    Args:
        parameters: a model, a parameter, or parameters, from any units and meshes, or from none.
        max_norm: the maximum; with `inf`, gradients are not scaled. A scalar tensor on a device is
            not read on the host: its sign is not checked, and a graph clips at its present value.
        norm_type: a p >= 0, or an infinity. For 0, the norm is the number of nonzero
            elements, where torch's is the number of gradients that have one.
        error_if_nonfinite: raise if the norm is not finite. The host waits for the device.

    Returns:
        The norm before clipping, a device scalar, the same on every rank. It is float64 if a
        gradient is, else float32.

    Streams:
        Two passes over each gradient shard, for the norm and for the factor, and one all-reduce of
        two numbers per process group, on the current stream. A collective: every rank must call it.

    Capture:
        Safe after a first call, without `error_if_nonfinite`.

    Raises:
        GradientError: `error_if_nonfinite` and the norm is not finite; or a gradient is sparse.
        OptionError: `max_norm` or `norm_type` is not a number, or `max_norm` is negative, or there
            is no such norm.
    """
    is_on_device = (
        isinstance(max_norm, torch.Tensor) and max_norm.ndim == 0 and max_norm.device.type != "cpu"
    )
    try:
        limit, order = max_norm if is_on_device else float(max_norm), float(norm_type)
    except (TypeError, ValueError) as error:
        raise OptionError(
            "max_norm and norm_type must be numbers",
            expected="values that float() accepts",
            got=f"max_norm={max_norm!r}, norm_type={norm_type!r}",
            fix="max_norm=1.0, norm_type=2.0",
        ) from error
    if not is_on_device and not limit >= 0:
        raise OptionError(
            "max_norm must not be negative",
            expected="a number >= 0, or inf",
            got=repr(max_norm),
            fix="max_norm=1.0",
        )
    params: list[torch.Tensor]
    if isinstance(parameters, nn.Module):
        params = list(parameters.parameters())
    else:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = select(params)
    device = params[0].device if params else torch.device("cpu")
    norm, nonfinite = norm_of(gradients, order, device)
    if error_if_nonfinite and nonfinite.item():
        raise GradientError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped.",
            expected="finite gradients",
            got=f"a norm of {norm.item()}",
            fix="error_if_nonfinite=False; shardgrad.optim then skips the step",
        )
    if is_on_device or limit != math.inf:
        gradients.multiply((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm
