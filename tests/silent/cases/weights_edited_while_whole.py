"""The weights are made whole, edited, and sharded again.

Report: https://github.com/pytorch/pytorch/issues/107081
Right: the edit stays, or its loss is named.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> torch.Tensor:
        if step == 1:
            with engine.whole(model), torch.no_grad():
                engine.inner(model)[0].weight[:4] = 0  # such as rows of new tokens
        return squares(model, rank, step)

    return train(engine, model, loss)
