"""GAN: generator and discriminator are trained through each other, one frozen at a time.

Report: https://github.com/pytorch/pytorch/issues/132068
Right: each is trained in its turn.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, squares, train


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.discriminator(self.generator(x).tanh())


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Gan())

    def loss(step: int) -> torch.Tensor:
        engine.inner(model).discriminator.requires_grad_(step % 2 == 1)
        engine.inner(model).generator.requires_grad_(step % 2 == 0)
        return squares(model, rank, step)

    return train(engine, model, loss, steps=4)
