"""Gradients come from `torch.autograd.grad`, not from `backward`.

Report: https://github.com/pytorch/pytorch/issues/47562
Right: they are averaged, or the call is refused.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        params = list(model.parameters())
        grads = torch.autograd.grad(model(batch(rank, step)).square().mean(), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        engine.backward(None, model)
        optimizer.step()
        optimizer.zero_grad()
    return model
