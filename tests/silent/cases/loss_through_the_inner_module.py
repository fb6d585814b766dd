"""The loss goes through `model.module`, past the wrapper.

Report: https://github.com/jingyaogong/minimind/issues/853
Right: gradients are averaged.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        policy = engine.inner(model)
        engine.backward(policy(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
