"""Two losses of one forward go backward one after the other.

Report: https://github.com/pytorch/pytorch/issues/47260
Right: both are averaged and added.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> torch.Tensor:
        out = model(batch(rank, step))
        with engine.no_sync(model):
            engine.backward(out.square().mean(), model, retain_graph=True)
        return out.abs().mean()

    return train(engine, model, loss)
