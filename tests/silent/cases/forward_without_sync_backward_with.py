"""Forward runs inside of `no_sync`, backward after it.

Report: https://github.com/huggingface/accelerate/pull/1726
Right: the backward averages its gradients.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> torch.Tensor:
        with engine.no_sync(model):
            loss = squares(model, rank, step)
        return loss

    return train(engine, model, loss)
