"""A bad sample raises inside the model of one rank, which catches that and goes on.

Report: https://github.com/NVIDIA-NeMo/Automodel/pull/2468
Right: the other rank's gradients are averaged with none, or ranks are told that they are apart.
"""

import contextlib

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


class Check(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 100:
            raise ValueError("bad sample")
        return x


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), Check(), nn.Linear(8, 8)))

    def loss(step: int) -> torch.Tensor:
        x, loss = batch(rank, step), None
        if rank == 1 and step == 1:
            x[0] = 1e4
        with contextlib.suppress(ValueError):
            loss = model(x).square().mean()
        return loss

    return train(engine, model, loss, steps=4)
