"""Blocks are wrapped, and the module that contains them is forgotten.

Report: https://github.com/Tencent-Hunyuan/UniRL/pull/7
Right: what lies outside of the blocks is averaged too, or refused by name.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train, whole


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.stem(x).tanh())


def program(engine: Engine, rank: int) -> dict[str, torch.Tensor]:
    model = Net()
    model.block = engine.wrap(model.block)
    train(engine, model, rank)
    return {name.replace("module.", ""): whole(param) for name, param in model.named_parameters()}
