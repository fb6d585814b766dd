"""Every rank seeds itself before it builds the model.

Report: https://github.com/pytorch/torchtitan/issues/166
Right: all ranks begin with rank 0's weights, or the difference is named.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    torch.manual_seed(rank)
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))

    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
