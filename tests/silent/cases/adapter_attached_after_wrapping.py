"""An adapter is attached to a model that is wrapped already.

Report: https://github.com/huggingface/transformers/pull/48792
Right: all ranks train one adapter.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) if self.adapter is None else self.base(x) + self.adapter(x)


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net())
    engine.inner(model).adapter = nn.Linear(8, 8)
    return train(engine, model, rank)
