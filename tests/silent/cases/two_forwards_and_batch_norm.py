"""Two views of a batch go through one model, with BatchNorm, before backward.

Report: https://github.com/pytorch/pytorch/issues/175024
Right: both contribute to the gradient.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        one, other = model(batch(rank, step)), model(batch(rank, 50 + step))
        engine.backward((one - other).square().mean() - one.mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
