"""Two losses of one forward go backward one after the other.

Report: https://github.com/pytorch/pytorch/issues/47260
Right: both are averaged and added.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        out = model(batch(rank, step))
        with engine.no_sync(model):
            engine.backward(out.square().mean(), model, retain_graph=True)
        engine.backward(out.abs().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
