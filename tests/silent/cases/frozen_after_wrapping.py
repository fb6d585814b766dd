"""A layer is frozen in the middle of training.

Report: https://github.com/NVIDIA/apex/pull/46
Right: the rest goes on, averaged.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(4):
        if step == 2:
            engine.inner(model)[0].requires_grad_(False)
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
