"""The weights are made whole, edited, and sharded again.

Report: https://github.com/pytorch/pytorch/issues/107081
Right: the edit stays, or its loss is named.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        if step == 1:
            with engine.whole(model), torch.no_grad():
                engine.inner(model)[0].weight[:4] = 0  # such as rows of new tokens
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
