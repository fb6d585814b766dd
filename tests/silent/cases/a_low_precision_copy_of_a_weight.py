"""A layer keeps a copy of its weight in low precision, made again when the weight has changed.

Report: https://github.com/NVIDIA/TransformerEngine/issues/3051
Right: every step computes with a copy of the weight as it is then.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Quantized(nn.Linear):
    version = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight._version != self.version:
            self.version, self.__dict__["copy"] = self.weight._version, self.weight.detach().half()
        low = self.copy.to(x.dtype)
        return nn.functional.linear(x, self.weight + (low - self.weight).detach(), self.bias)


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Quantized(8, 3)))
    return train(engine, model, rank)
