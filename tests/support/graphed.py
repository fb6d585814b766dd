"""The step that most tests of graphs take, which `graphed_step` decorates, or nothing does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad

Step = Callable[[Tensor], Tensor]


def on_one_gpu(model: nn.Sequential, **options: object) -> nn.Sequential:
    """Returns the model on the device of torch.cuda, each layer a unit."""
    mesh = init_device_mesh("cuda", (1,))
    for unit in (*model.cuda(), model):
        shardgrad.fully_shard(unit, mesh=mesh, **options)
    return model


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None = None
) -> Step:
    """Returns a step that trains on a batch and returns its loss."""

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        if max_norm is not None:
            shardgrad.clip_grad_norm_(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
