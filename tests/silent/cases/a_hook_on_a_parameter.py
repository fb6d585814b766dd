"""A hook of `register_hook` masks a parameter's gradient, so that pruned weights stay zero.

Report: https://github.com/meta-pytorch/torchrec/pull/4268
Report: https://github.com/pytorch/pytorch/issues/103958
Right: the hook runs.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model = engine.wrap(net)
    weight = next(model.parameters())
    weight.register_hook(lambda grad: grad * 0)

    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
