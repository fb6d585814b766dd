"""A custom backward writes `weight.grad` itself, as fused kernels and zero-bubble schedules do.

Report: https://github.com/pytorch/pytorch/issues/144530
Right: that gradient is averaged like the others.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        found = grad.t() @ x
        weight.grad = found if weight.grad is None else weight.grad + found
        return grad @ weight, None


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Fused.apply(x, self.weight) + self.bias


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), Layer(8, 8), nn.Linear(8, 3)))
    return train(engine, model, rank)
