"""Three micro-batches, accumulated by two: the optimizer steps after the third, which did not
synchronize.

Report: https://github.com/huggingface/accelerate/issues/2831
Right: the third one's gradients are averaged before the step.
"""

import contextlib

from torch import nn

from tests.silent.engines import Engine, mlp, squares


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    for _ in range(2):
        for number in range(3):
            is_boundary = number % 2 == 1
            with contextlib.nullcontext() if is_boundary else engine.no_sync(model):
                engine.backward(squares(model, rank, number), model)
            if is_boundary or number == 2:
                optimizer.step()
                optimizer.zero_grad()
    return model
