"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shardgrad
from shardgrad.programs.train.config import TrainConfig

_FINAL_RATIO = 0.1  # of the peak, at the end of the decay


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Builds AdamW, or SGD with momentum. Matrices have weight decay, vectors (norm weights) do
    not.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return shardgrad.optim.SGD(groups, lr=config.lr, momentum=0.9)
    return shardgrad.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def build_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LambdaLR:
    """Builds the schedule of :func:`lr_ratio`, to be stepped once per optimizer step."""
    return LambdaLR(
        optimizer, partial(lr_ratio, steps=config.steps, warmup_steps=config.warmup_steps)
    )


def lr_ratio(step: int, *, steps: int, warmup_steps: int) -> float:
    """Returns the learning rate of a step as a fraction of its peak: linear warmup, then cosine
    decay.

    Args:
        step: number of the step, from 0.
        steps: number of steps of the run; step `steps - 1` and later ones get a tenth.
        warmup_steps: the first step with the full rate, if the run is that long.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, steps - 1 - warmup_steps))
    return _FINAL_RATIO + (1 - _FINAL_RATIO) * 0.5 * (1 + math.cos(math.pi * progress))
