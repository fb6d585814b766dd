"""A plain `GradScaler`, and an overflow in the shard of one rank.

Report: https://github.com/facebookresearch/fairscale/issues/754
Right: all ranks skip the step.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    net = nn.Linear(8, 8, bias=False)
    model = engine.wrap(net)
    optimizer = engine.optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step in range(4):
        out = model(batch(rank, step))
        weight = torch.ones(8)
        if step == 1:
            weight[0] = 1e38  # overflows in the first row of the weight only
        engine.backward(scaler.scale((out * weight).mean()), model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model
