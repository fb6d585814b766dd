"""Parameters stay whole between forward and backward, and the model is evaluated before the step.

Report: https://github.com/NVIDIA/Megatron-LM/pull/6336
Right: the next forward computes with the new weights.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp(), keep=True)

    def evaluate() -> None:
        with torch.no_grad():
            model(batch(rank, 99))

    return train(engine, model, lambda step: model(batch(rank, step)).square().sum(), then=evaluate)
