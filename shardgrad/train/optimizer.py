"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shardgrad
from shardgrad.train.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW or SGD with momentum; matrices decay, vectors (the norms' scales) do not.

    shardgrad's own optimizers, unless another engine shards: those get torch's, as they would elsewhere.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    home: Any = torch.optim if config.engine == "fsdp2" else shardgrad.optim
    # Of a model without units, the clipping's verdict does not reach the optimizer.
    looking: dict[str, bool] = {"check_finite": True} if config.engine == "none" else {}
    if config.optimizer == "sgd":
        return home.SGD(groups, lr=config.lr, momentum=0.9, **looking)  # type: ignore[no-any-return]
    return home.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True, **looking)  # type: ignore[no-any-return]


def build_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LambdaLR:
    """The schedule of :func:`lr_ratio`, to be stepped once per optimizer step."""

    def ratio(step: int) -> float:
        return lr_ratio(
            step, steps=config.steps, warmup_steps=config.warmup_steps, final_ratio=config.final_lr_ratio
        )

    return LambdaLR(optimizer, ratio)


def lr_ratio(step: int, *, steps: int, warmup_steps: int, final_ratio: float) -> float:
    """The learning rate of a step as a part of its peak: a linear rise, then half a cosine.

    Args:
        step: 0 for the first step.
        steps: steps of the whole run; the last one, `steps - 1`, and all after it get `final_ratio`.
        warmup_steps: the first step that has the full rate, where the run is that long.
        final_ratio: where the cosine ends.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
