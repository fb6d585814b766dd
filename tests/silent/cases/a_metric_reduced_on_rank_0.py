"""Rank 0 alone averages its loss over the ranks, to log it.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/19106
Right: the metric does not mix with gradients, and a rank that waits for it says so.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(8))

    def loss(step: int) -> torch.Tensor:
        loss = squares(model, rank, step)
        if rank == 0 and engine.name != "torch":
            torch.distributed.all_reduce(loss.detach().clone())
        return loss

    return train(engine, model, loss)
