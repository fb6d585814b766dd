"""Gradients are clipped with `torch.nn.utils.clip_grad_norm_`.

Report: https://github.com/pytorch/pytorch/issues/72548
Report: https://github.com/deepspeedai/DeepSpeed/issues/6480
Right: the norm is that of the whole model.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    return train(
        engine,
        model,
        lambda step: model(100 * batch(rank, step)).square().sum(),
        then=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    )
