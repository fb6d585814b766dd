"""A layer that no rank uses, and weight decay.

Report: https://github.com/pytorch/pytorch/issues/28294
Right: the layer stays as it is.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net(), units=[])
    return train(
        engine,
        model,
        rank,
        optimizer=engine.optimizer(model, torch.optim.AdamW, lr=0.1, weight_decay=0.5),
    )
