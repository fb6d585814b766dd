"""The loss goes through `model.module`, past the wrapper.

Report: https://github.com/jingyaogong/minimind/issues/853
Right: gradients are averaged.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> torch.Tensor:
        policy = engine.inner(model)
        return policy(batch(rank, step)).square().mean()

    return train(engine, model, loss)
