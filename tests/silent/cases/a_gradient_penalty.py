"""A penalty on the gradients of the inputs: `create_graph=True`.

Report: https://github.com/pytorch/pytorch/issues/63812
Right: the penalty's gradients arrive too, averaged.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> torch.Tensor:
        x = batch(rank, step).requires_grad_()
        score = model(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score + slope.square().sum()

    return train(engine, model, loss)
