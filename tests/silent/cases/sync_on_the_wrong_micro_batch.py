"""The first of two micro-batches synchronizes, not the last.

Report: https://github.com/modelscope/FunASR/pull/3472
Right: both are averaged before the step, or the loss of one is named.
"""

import contextlib

from torch import nn

from tests.silent.engines import Engine, mlp, squares


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model)
    for number in range(6):
        with contextlib.nullcontext() if number % 2 == 0 else engine.no_sync(model):
            engine.backward(squares(model, rank, number), model)
        if (number + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
