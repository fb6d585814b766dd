"""HSDP whose shard groups have one rank each, and two micro-batches.

Report: https://github.com/verl-project/verl/issues/7493
Right: gradients are averaged over the replicas.
"""

from torch import nn

from tests.silent.engines import Engine, mlp, squares


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(), mesh=(2, 1))
    optimizer = engine.optimizer(model)
    for step in range(3):
        for part in range(2):
            engine.backward(squares(model, rank, 2 * step + part), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
