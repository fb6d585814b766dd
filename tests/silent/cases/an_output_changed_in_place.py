"""The output of a layer is a view, and is changed in place.

Report: https://github.com/pytorch/pytorch/issues/181832
Right: the layer is trained.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x).unsqueeze(0) * self.linear.weight.mean()).squeeze(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y += x
        return self.b(y)


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())
    return train(engine, model, rank)
