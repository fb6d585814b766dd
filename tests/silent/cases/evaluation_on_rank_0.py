"""Rank 0 alone evaluates the model between two steps.

Report: https://github.com/facebookresearch/fairscale/issues/703
Right: it evaluates, or ranks are told that they are apart.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(8))

    def evaluate(step: int) -> None:
        if rank == 0:
            with torch.no_grad():
                model(batch(rank, 99))

    return train(engine, model, rank, after=evaluate)
