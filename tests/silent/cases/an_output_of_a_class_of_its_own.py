"""Forward returns an object that torch cannot look into.

Report: https://github.com/pytorch/pytorch/issues/124666
Report: https://github.com/pytorch/pytorch/issues/168143
Right: gradients are averaged.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.b(self.a(x).tanh()).square().mean())


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net(), units=[])
    return train(engine, model, lambda step: model(batch(rank, step)).loss)
