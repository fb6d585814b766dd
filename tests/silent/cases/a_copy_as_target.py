"""A target network is a copy of the wrapped model, and follows it slowly.

Report: https://github.com/pytorch/pytorch/issues/82070
Report: https://github.com/deepspeedai/DeepSpeed/issues/2056
Right: the copy has the model's weights, and follows them.
"""

import copy

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    target = copy.deepcopy(model).requires_grad_(False)
    for step in range(3):
        with torch.no_grad():
            goal = target(batch(rank, 50 + step)) + 1
        engine.backward((model(batch(rank, step)) - goal).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
        for slow, param in zip(target.parameters(), model.parameters(), strict=True):
            slow.data.lerp_(param.data, 0.5)
    return model
