"""Gradients are changed between backward and step.

Report: https://github.com/deepspeedai/DeepSpeed/issues/1295
Right: the optimizer sees the change.
"""

from torch import nn

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def halve() -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    return train(engine, model, rank, then=halve)
