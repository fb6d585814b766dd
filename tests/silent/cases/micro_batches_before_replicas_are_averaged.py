"""HSDP with three micro-batches: replicas are averaged in the last one only.

Report: https://github.com/NVIDIA/Megatron-LM/pull/7186
Right: the gradients of all three come to the step, not those of the last one.
"""

import contextlib

from torch import nn

from tests.silent.engines import Engine, mlp, squares


def program(engine: Engine, rank: int) -> nn.Module:
    model = mlp()
    model = engine.wrap(model, mesh=(2, 1))
    optimizer = engine.optimizer(model)
    for step in range(3):
        for part in range(3):
            with contextlib.nullcontext() if part == 2 else engine.no_sync(model, replicas=True):
                engine.backward(squares(model, rank, 3 * step + part), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
