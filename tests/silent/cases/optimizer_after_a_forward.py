"""The model runs once before the optimizer is built.

Report: https://github.com/pytorch/pytorch/issues/149205
Right: the model is trained, or the optimizer is refused.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), units=[])
    with torch.no_grad():
        model(batch(rank, 99))  # to see that it runs
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
