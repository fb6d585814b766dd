"""Rank 0 alone collects the whole weights, to save them.

Report: https://github.com/kyuz0/amd-strix-halo-llm-finetuning/pull/6
Right: it gets them, or a rank that waits says for whom.
"""

from torch import nn

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(8))

    def save(step: int) -> None:
        if rank == 0:
            engine.parameters(model)

    return train(engine, model, rank, after=save)
