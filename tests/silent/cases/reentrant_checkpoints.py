"""Reentrant activation checkpoints of a layer that runs twice.

Report: https://github.com/pytorch/pytorch/issues/153354
Right: gradients of both calls are added and averaged.
"""

import torch
import torch.utils.checkpoint
from torch import nn

from tests.silent.engines import Engine, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.b, x.tanh(), use_reentrant=True)
        return x


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())
    return train(engine, model, rank)
