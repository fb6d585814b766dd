"""A parameter without dims, as CLIP's temperature.

Report: https://github.com/pytorch/pytorch/pull/132934
Right: it is trained, or refused by name.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.temperature


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())
    return train(engine, model, rank)
