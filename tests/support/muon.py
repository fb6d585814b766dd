"""What the tests of `shardgrad.optim.Muon` share: a tight oracle, and a program for both sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import _muon

import shardgrad
from shardgrad.optim import ownership
from tests.support.parity import (
    UNSHARDED,
    Engine,
    Tensors,
    float64,
    hsdp_mesh,
    token_loss,
    tower,
)


def textbook(grad: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
    """Newton-Schulz as it is written down, in the gradient's dtype, without transposing."""
    a, b, c = coefficients
    x = grad / grad.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@contextmanager
def exactly() -> Iterator[None]:
    """torch's optimizer always iterates in bfloat16; here in float64, so that a comparison can be
    tight. Units are exchanged in several buckets, small as they are.
    """
    iterated = mock.patch.object(_muon, "_zeropower_via_newtonschulz", textbook)
    with float64(), iterated, mock.patch.object(ownership, "_LEAST_NUMEL", 1):
        yield


def muon(engine: Engine, params: Any, **options: Any) -> torch.optim.Optimizer:
    """Returns our optimizer for our engine, and torch's for the unsharded oracle."""
    kind = torch.optim.Muon if engine == UNSHARDED else shardgrad.optim.Muon
    return kind(params, **options)


def both(engine: Engine, model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest, which lies between them in every unit."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [muon(engine, matrices, **{"lr": 0.02, **options}), engine.optim.AdamW(others, lr=1e-2)]


def train(
    engine: Engine,
    *,
    mesh: tuple[int, int] | None = None,
    scaled: bool = False,
    **options: Any,
) -> Tensors:
    """Ten steps with a learning rate, a momentum and a weight decay that change, and a loss that is
    `scaled` by another factor in each, of which optimizers are told as by torch's scaler.
    """
    sharding = {} if mesh is None else {"mesh": hsdp_mesh(*mesh)}
    model = engine.shard_tower(tower(), **sharding)
    optims = both(engine, model, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optims[0], max_lr=0.02, total_steps=12, base_momentum=0.7, max_momentum=0.95
    )
    history: Tensors = {}
    for step in range(10):
        loss = token_loss(model, engine.tokens(step))
        scale = 2.0**step if scaled else 1.0
        (loss * scale).backward()
        history[f"loss {step}"] = engine.mean(loss)
        if step == 5:
            optims[0].param_groups[0]["weight_decay"] = 0.5
        for optim in optims:
            optim.grad_scale = torch.tensor(scale) if scaled else None
            optim.step()
            optim.zero_grad()
        schedule.step()
    return {**history, **engine.snapshot(model)}


# float64: a rounding of 2**-53 in a gradient is carried by the iteration's slope at zero, 3.4445**5
# = 485, to an update, in ten steps, with a margin of two for what they do to each other.
TIGHT = 2 * 10 * 485 * 2**-53


def cut_like(param: DTensor, whole: Tensor) -> DTensor:
    return distribute_tensor(whole, param.device_mesh, param.placements)
