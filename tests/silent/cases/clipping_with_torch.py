"""Gradients are clipped with `torch.nn.utils.clip_grad_norm_`.

Report: https://github.com/pytorch/pytorch/issues/72548
Report: https://github.com/deepspeedai/DeepSpeed/issues/6480
Right: the norm is that of the whole model.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(100 * batch(rank, step)).square().sum(), model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model
