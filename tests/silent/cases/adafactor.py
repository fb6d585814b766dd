"""Adafactor, whose statistics are those of whole rows and columns.

Report: https://github.com/pytorch/pytorch/issues/109581
Right: the statistics are of the whole parameter, or the optimizer is refused.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    return train(
        engine,
        model,
        rank,
        optimizer=engine.optimizer(model, torch.optim.Adafactor, lr=0.1),
    )
