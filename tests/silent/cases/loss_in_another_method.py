"""The loss is computed by a method that is not forward.

Report: https://github.com/OpenTSLM/OpenTSLM/pull/49
Right: gradients are averaged, or the call is refused by name.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def compute_loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.b(self.a(x)) * self.scale - x).square().mean()


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())
    return train(engine, model, lambda step: engine.inner(model).compute_loss(batch(rank, step)))
