"""Weights are tied after the model is wrapped.

Report: https://github.com/NVIDIA-NeMo/Automodel/pull/2213
Right: one weight gets the gradients of both uses.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())
    engine.inner(model).head.weight = engine.inner(model).embed.weight

    def loss(step: int) -> torch.Tensor:
        tokens = torch.arange(rank + step, rank + step + 3) % 6
        return nn.functional.cross_entropy(model(tokens), tokens)

    return train(engine, model, loss)
