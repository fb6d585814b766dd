"""LayerDrop: a rank skips a layer that the other rank runs.

Report: https://github.com/facebookresearch/fairscale/issues/796
Right: a layer's gradients are averaged with those of the ranks that ran it, or ranks are told.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, dropped: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == dropped else layer(x).tanh()
        return x


def program(engine: Engine, rank: int) -> nn.Module:
    net = Net()
    model = engine.wrap(net, units=list(net.layers))
    return train(
        engine, model, lambda step: model(batch(rank, step), (rank + step) % 3).square().mean()
    )
