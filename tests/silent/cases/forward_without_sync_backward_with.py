"""Forward runs inside of `no_sync`, backward after it.

Report: https://github.com/huggingface/accelerate/pull/1726
Right: the backward averages its gradients.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        with engine.no_sync(model):
            loss = model(batch(rank, step)).square().mean()
        engine.backward(loss, model)
        optimizer.step()
        optimizer.zero_grad()
    return model
