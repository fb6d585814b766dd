"""Rank 0 alone collects the whole weights, to save them.

Report: https://github.com/kyuz0/amd-strix-halo-llm-finetuning/pull/6
Right: it gets them, or a rank that waits says for whom.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            engine.parameters(model)
    return model
