"""The optimizer is built first, and holds parameters that wrapping replaces.

Report: https://github.com/huggingface/accelerate/issues/3256
Right: the model is trained, or the optimizer is named.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = engine.wrap(net)
    return train(
        engine,
        model,
        rank,
        optimizer=engine.optimizer(model, optimizer),
    )
