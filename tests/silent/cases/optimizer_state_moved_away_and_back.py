"""RL: between two steps every tensor of the optimizer's state is moved away and back.

Report: https://github.com/Tencent-Hunyuan/UniRL/pull/441
Right: moments and step counts go on from where they were.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, train


def moved(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.to("cpu", copy=True)


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model, torch.optim.AdamW, lr=0.1)

    def away_and_back(step: int) -> None:
        moved(optimizer)  # weights are sent to the generator meanwhile
        moved(optimizer)

    return train(engine, model, rank, steps=4, optimizer=optimizer, after=away_and_back)
