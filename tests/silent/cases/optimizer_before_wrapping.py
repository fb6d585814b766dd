"""The optimizer is built first, and holds parameters that wrapping replaces.

Report: https://github.com/huggingface/accelerate/issues/3256
Right: the model is trained, or the optimizer is named.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = engine.wrap(net)
    optimizer = engine.optimizer(model, optimizer)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
