"""`MultiheadAttention` uses the weight of its projection, a unit, without calling it.

Report: https://github.com/facebookresearch/fairscale/issues/899
Right: the weight is trained, or the call is refused by name.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


def program(engine: Engine, rank: int) -> nn.Module:
    attention = nn.MultiheadAttention(8, 2)
    model = engine.wrap(attention, units=[attention.out_proj])  # a policy that wraps every Linear

    def loss(step: int) -> torch.Tensor:
        x = batch(rank, step)
        return model(x, x, x)[0].square().mean()

    return train(engine, model, loss)
