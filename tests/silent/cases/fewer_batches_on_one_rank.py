"""A rank has one batch less than the other.

Report: https://github.com/deepspeedai/DeepSpeed/issues/2223
Right: the last gradients are averaged with none, or a rank that waits says for whom.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(4):
        is_left = rank == 0 or step < 3
        engine.backward(model(batch(rank, step)).square().mean() if is_left else None, model)
        optimizer.step()
        optimizer.zero_grad()
    return model
