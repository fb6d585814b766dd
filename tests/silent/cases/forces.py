"""A potential: forces are gradients inside of forward, and the loss is on them.

Report: https://github.com/soran-ghaderi/torchebm/issues/244
Right: the second derivatives arrive, averaged.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def program(engine: Engine, rank: int) -> nn.Module:
    net = Potential()
    model = engine.wrap(net, units=list(net.energy)[::2])

    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
