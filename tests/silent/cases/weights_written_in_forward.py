"""Forward normalizes its weight in place, as nGPT does.

Report: https://github.com/pytorch/pytorch/issues/103958
Right: the weight stays normalized, or the loss of the write is named.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Normalized(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(Normalized(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    return train(engine, model, rank)
