"""Two views of a batch go through one model, with BatchNorm, before backward.

Report: https://github.com/pytorch/pytorch/issues/175024
Right: both contribute to the gradient.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))

    def loss(step: int) -> torch.Tensor:
        one, other = model(batch(rank, step)), model(batch(rank, 50 + step))
        return (one - other).square().mean() - one.mean()

    return train(engine, model, loss)
