"""A rank skips the backward of a loss that is not finite, and goes on.

Report: https://github.com/Project-MONAI/monai-physio/pull/137
Right: the other rank's gradients are averaged with none, or ranks are told that they are apart.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(8))

    def loss(step: int) -> torch.Tensor | None:
        loss = squares(model, rank, step)
        if rank == 1 and step == 1:
            loss = loss * float("nan")
        return loss if loss.isfinite() else None

    return train(engine, model, loss, steps=4)
