"""A penalty on the gradients of the inputs: `create_graph=True`.

Report: https://github.com/pytorch/pytorch/issues/63812
Right: the penalty's gradients arrive too, averaged.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        x = batch(rank, step).requires_grad_()
        score = model(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        engine.backward(score + slope.square().sum(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
