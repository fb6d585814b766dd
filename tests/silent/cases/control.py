"""A program without a mistake: the warnings it gets from an engine are the usual ones."""

from torch import nn

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    return train(engine, model, rank)
