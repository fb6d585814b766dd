"""A hook of `register_hook` masks a parameter's gradient, so that pruned weights stay zero.

Report: https://github.com/meta-pytorch/torchrec/pull/4268
Report: https://github.com/pytorch/pytorch/issues/103958
Right: the hook runs.
"""

from torch import nn

from tests.silent.engines import Engine, mlp, train


def program(engine: Engine, rank: int) -> nn.Module:
    net = mlp()
    model = engine.wrap(net)
    weight = next(model.parameters())
    weight.register_hook(lambda grad: grad * 0)
    return train(engine, model, rank)
