"""Parameters stay whole between forward and backward, and the model is evaluated before the step.

Report: https://github.com/NVIDIA/Megatron-LM/pull/6336
Right: the next forward computes with the new weights.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(), keep=True)
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().sum(), model)
        with torch.no_grad():
            model(batch(rank, 99))
        optimizer.step()
        optimizer.zero_grad()
    return model
