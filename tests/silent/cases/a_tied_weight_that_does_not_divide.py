"""A weight is tied across units, and its rows do not divide evenly.

Report: https://github.com/pytorch/pytorch/issues/176076
Right: every row gets the gradients of both uses.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())

    def loss(step: int) -> torch.Tensor:
        tokens = torch.arange(rank + step, rank + step + 3) % 5
        return nn.functional.cross_entropy(model(tokens), tokens)

    return train(engine, model, loss)
