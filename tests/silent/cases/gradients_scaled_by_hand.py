"""Gradients are changed between backward and step.

Report: https://github.com/deepspeedai/DeepSpeed/issues/1295
Right: the optimizer sees the change.
"""

from torch import nn

from tests.silent.engines import Engine, batch, mlp


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model
