"""An embedding with sparse gradients.

Report: https://github.com/pytorch/pytorch/issues/111422
Right: they are averaged, or refused by name.
"""

import torch
from torch import nn

from tests.silent.engines import Engine


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 8, sparse=True), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())
    optimizer = engine.optimizer(model)
    for step in range(3):
        tokens = torch.arange(rank + step, rank + step + 3) % 6
        engine.backward(nn.functional.cross_entropy(model(tokens), tokens), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
