"""The model is evaluated between backward and clipping.

Report: https://github.com/pytorch/pytorch/issues/144289
Right: all gradients are clipped by the norm of all.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp


def program(engine: Engine, rank: int) -> nn.Module:
    net = mlp()
    model = engine.wrap(net, units=[net[0]])
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(10 * batch(rank, step)).square().sum(), model)
        with torch.no_grad():
            model(batch(rank, 99))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model
