"""The model runs once before the optimizer is built.

Report: https://github.com/pytorch/pytorch/issues/149205
Right: the model is trained, or the optimizer is refused.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(), units=[])
    with torch.no_grad():
        model(batch(rank, 99))  # to see that it runs
    return train(engine, model, rank)
