"""A potential: forces are gradients inside of forward, and the loss is on them.

Report: https://github.com/soran-ghaderi/torchebm/issues/244
Right: the second derivatives arrive, averaged.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, train


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def program(engine: Engine, rank: int) -> nn.Module:
    net = Potential()
    model = engine.wrap(net, units=list(net.energy)[::2])
    return train(engine, model, rank)
