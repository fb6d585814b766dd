"""Gradients come from `torch.autograd.grad`, not from `backward`.

Report: https://github.com/pytorch/pytorch/issues/47562
Right: they are averaged, or the call is refused.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> None:
        params = list(model.parameters())
        grads = torch.autograd.grad(squares(model, rank, step), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    return train(engine, model, loss)
