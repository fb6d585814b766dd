"""Gradients are changed between backward and step.

Report: https://github.com/deepspeedai/DeepSpeed/issues/1295
Right: the optimizer sees the change.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model
