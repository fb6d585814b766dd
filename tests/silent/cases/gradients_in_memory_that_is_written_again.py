"""A backward hands out its gradient in memory that its next run writes, as a replayed graph does.

Report: https://github.com/pytorch/pytorch/issues/96693
Right: the gradients of both micro-batches are added, not the last one twice.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, squares, train


class Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, static):
        ctx.save_for_backward(x, weight)
        ctx.static = static
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        torch.mm(grad.t(), ctx.saved_tensors[0], out=ctx.static)
        return grad @ ctx.saved_tensors[1], ctx.static.detach(), None


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Replayed.apply(x, self.weight, self.__dict__.setdefault("static", torch.empty(8, 8)))


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(Layer(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)))

    def loss(step: int) -> torch.Tensor:
        with engine.no_sync(model):
            engine.backward(squares(model, rank, step), model)
        return squares(model, rank, 9 + step)

    return train(engine, model, loss)
