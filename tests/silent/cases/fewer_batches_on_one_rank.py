"""A rank has one batch less than the other.

Report: https://github.com/deepspeedai/DeepSpeed/issues/2223
Right: the last gradients are averaged with none, or a rank that waits says for whom.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> torch.Tensor | None:
        is_left = rank == 0 or step < 3
        return squares(model, rank, step) if is_left else None

    return train(engine, model, loss, steps=4)
