"""SAM: weights move along the gradient, a second gradient is taken, and they move back.

Report: https://github.com/facebookresearch/fairscale/issues/989
Right: the norm is that of the whole gradient, and weights come back.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(squares(model, rank, step), model)
        params = [param for param in model.parameters() if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        moves = [param.grad / norm for param in params]
        for param, move in zip(params, moves, strict=True):
            param.data.add_(move)
        optimizer.zero_grad()
        engine.backward(squares(model, rank, step), model)
        for param, move in zip(params, moves, strict=True):
            param.data.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    return model
