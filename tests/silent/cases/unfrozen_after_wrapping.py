"""A layer is frozen when the model is wrapped, and unfrozen later.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/20340
Right: from then on it is trained, averaged.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares, train


def program(engine: Engine, rank: int) -> nn.Module:
    net = mlp()
    net[0].requires_grad_(False)
    model = engine.wrap(net)

    def loss(step: int) -> torch.Tensor:
        if step == 2:
            engine.inner(model)[0].requires_grad_(True)
        return squares(model, rank, step)

    return train(engine, model, loss, steps=4)
