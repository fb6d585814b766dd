"""Ranks generate until an end token, one of them for longer.

Report: https://github.com/deepspeedai/DeepSpeed/issues/8262
Right: each generates its text, or ranks are told that they are apart.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(8))

    def loss(step: int) -> torch.Tensor:
        with torch.no_grad():
            x = batch(rank, step)
            for _ in range(2 + rank):  # tokens until the end
                x = model(x)
        return model(x).square().mean()

    return train(engine, model, loss)
