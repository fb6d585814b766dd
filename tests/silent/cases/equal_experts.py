"""Ranks use different experts of one size in the same step.

Report: https://github.com/pytorch/pytorch/issues/158719
Right: each expert gets its own gradients, halved.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](x)


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net(), units=[])
    return train(
        engine, model, lambda step: model(batch(rank, step), (rank + step) % 2).square().mean()
    )
