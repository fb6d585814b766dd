"""Adafactor, whose statistics are those of whole rows and columns.

Report: https://github.com/pytorch/pytorch/issues/109581
Right: the statistics are of the whole parameter, or the optimizer is refused.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model, torch.optim.Adafactor, lr=0.1)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
