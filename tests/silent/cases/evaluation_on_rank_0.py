"""Rank 0 alone evaluates the model between two steps.

Report: https://github.com/facebookresearch/fairscale/issues/703
Right: it evaluates, or ranks are told that they are apart.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                model(batch(rank, 99))
    return model
