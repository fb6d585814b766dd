"""Ranks register the same layers in another order.

Report: https://github.com/NVIDIA/Megatron-LM/pull/2218
Right: layers of one name are averaged, or the difference is named.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Net(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})
        for name in ("left", "right"):
            nn.init.constant_(self.heads[name].weight, 0.1 if name == "left" else 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads["left"](x).tanh() + self.heads["right"](x)


def program(engine: Engine, rank: int) -> nn.Module:
    names = ["left", "right"] if rank == 0 else ["right", "left"]  # the order of a set, for example
    model = engine.wrap(Net(names), units=[])
    return train(engine, model, rank)
