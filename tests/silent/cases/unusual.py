"""Unusual parameters."""

import torch
from torch import Tensor, nn

from tests.silent.engines import Engine


def a_scalar_parameter(engine: Engine) -> nn.Module:
    """A parameter without dims, as CLIP's temperature.

    Report: https://github.com/pytorch/pytorch/pull/132934
    Right: it is trained, or refused by name.
    """

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x) * self.temperature

    net = Net(nn.Linear(8, 8))
    net.temperature = nn.Parameter(torch.tensor(0.5))
    model = engine.wrap(net)
    return engine.train(model)


def a_sparse_embedding(engine: Engine) -> nn.Module:
    """An embedding with sparse gradients.

    Report: https://github.com/pytorch/pytorch/issues/111422
    Right: they are averaged, or refused by name.
    """
    model = engine.wrap(nn.Sequential(nn.Embedding(6, 8, sparse=True), nn.Linear(8, 6)))
    return engine.train(model, lambda step: engine.of_tokens(model, step, vocabulary=6))


def channels_last(engine: Engine) -> nn.Module:
    """A convolution in channels-last memory.

    Report: https://github.com/pytorch/pytorch/pull/137382
    Right: it is trained, or refused by name.
    """
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2)).to(
        memory_format=torch.channels_last
    )
    model = engine.wrap(net)

    def loss(step: int) -> Tensor:
        x = engine.batch(step, rows=8, columns=16).view(4, 2, 4, 4)
        return model(x).square().mean()

    return engine.train(model, loss)
