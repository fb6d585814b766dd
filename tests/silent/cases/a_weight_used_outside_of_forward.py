"""The loss uses the head's weight itself, as fused cross-entropies do.

Report: https://github.com/apple/ml-cross-entropy/issues/31
Right: the head is trained, averaged, or the use is refused by name.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())

    def loss(step: int) -> torch.Tensor:
        hidden = model(batch(rank, step))
        logits = hidden @ engine.inner(model).head.weight.t()
        return nn.functional.cross_entropy(logits, torch.arange(4))

    return train(engine, model, loss)
