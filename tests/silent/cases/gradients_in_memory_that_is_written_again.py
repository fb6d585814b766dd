"""A backward hands out its gradient in memory that its next run writes, as a replayed graph does.

Report: https://github.com/pytorch/pytorch/issues/96693
Right: the gradients of both micro-batches are added, not the last one twice.
"""

import contextlib

import torch
from torch import nn

from tests.silent.engines import Engine, batch


class Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, static):
        ctx.save_for_backward(x, weight)
        ctx.static = static
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        torch.mm(grad.t(), x, out=ctx.static)
        return grad @ weight, ctx.static.detach(), None  # a tensor of its own, in the same memory


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__.setdefault("static", torch.empty(self.out_features, self.in_features))
        return Replayed.apply(x, self.weight, self.static) + self.bias


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), Layer(8, 8), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for number in range(6):
        with contextlib.nullcontext() if number % 2 else engine.no_sync(model):
            engine.backward(model(batch(rank, number)).square().mean(), model)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model
