"""The model is evaluated between backward and clipping.

Report: https://github.com/pytorch/pytorch/issues/144289
Right: all gradients are clipped by the norm of all.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    net = mlp()
    model = engine.wrap(net, units=[net[0]])

    def evaluate_and_clip() -> None:
        with torch.no_grad():
            model(batch(rank, 99))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def loss(step: int) -> torch.Tensor:
        return model(10 * batch(rank, step)).square().sum()

    return train(engine, model, loss, then=evaluate_and_clip)
