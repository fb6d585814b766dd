"""An embedding with sparse gradients.

Report: https://github.com/pytorch/pytorch/issues/111422
Right: they are averaged, or refused by name.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 8, sparse=True), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())

    def loss(step: int) -> torch.Tensor:
        tokens = torch.arange(rank + step, rank + step + 3) % 6
        return nn.functional.cross_entropy(model(tokens), tokens)

    return train(engine, model, loss)
