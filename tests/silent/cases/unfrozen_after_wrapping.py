"""A layer is frozen when the model is wrapped, and unfrozen later.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/20340
Right: from then on it is trained, averaged.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    net[0].requires_grad_(False)
    model = engine.wrap(net)
    optimizer = engine.optimizer(model)
    for step in range(4):
        if step == 2:
            engine.inner(model)[0].requires_grad_(True)
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
