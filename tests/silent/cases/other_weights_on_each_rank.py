"""Every rank seeds itself before it builds the model.

Report: https://github.com/pytorch/torchtitan/issues/166
Right: all ranks begin with rank 0's weights, or the difference is named.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    torch.manual_seed(rank)
    model = engine.wrap(mlp())
    return train(engine, model, rank)
