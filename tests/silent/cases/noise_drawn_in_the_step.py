"""Diffusion: a step, replayed where an engine can, draws times, noise and dropout masks.

Report: https://github.com/baidu-baige/LoongForge/issues/49
Right: every step draws numbers of its own, those that the step draws without an engine.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8))
    model = engine.wrap(model)
    optimizer = engine.optimizer(model)
    torch.manual_seed(rank)

    def train(x: torch.Tensor) -> None:
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        predicted = model(time * x + (1 - time) * noise)
        engine.backward((predicted - (x - noise)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()

    train = engine.replayed(train, model, optimizer)
    for step in range(8):
        train(batch(rank, step))
    return model
