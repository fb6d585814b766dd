"""A convolution in channels-last memory.

Report: https://github.com/pytorch/pytorch/pull/137382
Right: it is trained, or refused by name.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


def program(engine: Engine, rank: int) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2)).to(
        memory_format=torch.channels_last
    )
    model = engine.wrap(net)

    def loss(step: int) -> torch.Tensor:
        x = batch(rank, step, rows=8, columns=16).view(4, 2, 4, 4)
        return model(x).square().mean()

    return train(engine, model, loss)
