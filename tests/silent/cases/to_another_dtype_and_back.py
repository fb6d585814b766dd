"""The model goes to another dtype and back between two steps.

Report: https://github.com/pytorch/pytorch/issues/104336
Right: training goes on as before.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> torch.Tensor:
        if step == 2:
            model.double().float()
        return squares(model, rank, step)

    return train(engine, model, loss, steps=4)
