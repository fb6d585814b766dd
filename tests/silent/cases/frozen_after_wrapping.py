"""A layer is frozen in the middle of training.

Report: https://github.com/NVIDIA/apex/pull/46
Right: the rest goes on, averaged.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> torch.Tensor:
        if step == 2:
            engine.inner(model)[0].requires_grad_(False)
        return squares(model, rank, step)

    return train(engine, model, loss, steps=4)
