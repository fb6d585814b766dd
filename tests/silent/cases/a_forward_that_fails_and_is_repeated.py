"""A forward runs out of memory on every rank, is caught, and is repeated with half of the batch.

Report: https://github.com/pytorch/torchtitan/issues/1329
Right: the second forward counts alone.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


class Check(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            raise RuntimeError("out of memory")
        return x


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), Check(), nn.Linear(8, 3)))

    def loss(step: int) -> torch.Tensor:
        x = batch(rank, step, rows=8)
        try:
            loss = model(x).square().mean()
        except RuntimeError:
            loss = model(x[:4]).square().mean()
        return loss

    return train(engine, model, loss)
