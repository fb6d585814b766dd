"""`MultiheadAttention` uses the weight of its projection, a unit, without calling it.

Report: https://github.com/facebookresearch/fairscale/issues/899
Right: the weight is trained, or the call is refused by name.
"""

from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> nn.Module:
    attention = nn.MultiheadAttention(8, 2)
    model = engine.wrap(attention, units=[attention.out_proj])  # a policy that wraps every Linear
    optimizer = engine.optimizer(model)
    for step in range(3):
        x = batch(rank, step)
        engine.backward(model(x, x, x)[0].square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
