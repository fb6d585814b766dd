"""The model is called by `torch.func.functional_call`, with its own parameters.

Report: https://github.com/soran-ghaderi/torchebm/pull/251
Right: gradients are averaged as after a call of the model.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = engine.optimizer(model)
    for step in range(3):
        net = engine.inner(model)
        out = torch.func.functional_call(net, dict(net.named_parameters()), (batch(rank, step),))
        engine.backward(out.square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
