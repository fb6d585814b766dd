"""The model is called by `torch.func.functional_call`, with its own parameters.

Report: https://github.com/soran-ghaderi/torchebm/pull/251
Right: gradients are averaged as after a call of the model.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())

    def loss(step: int) -> torch.Tensor:
        net = engine.inner(model)
        out = torch.func.functional_call(net, dict(net.named_parameters()), (batch(rank, step),))
        return out.square().mean()

    return train(engine, model, loss)
