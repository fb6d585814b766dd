"""`state_dict()` is saved with `torch.save`, and a plain model loads it.

Report: https://github.com/huggingface/transformers/issues/20082
Report: https://github.com/pytorch/examples/issues/1029
Right: the plain model has the trained weights, or loading is refused.
"""

import io

import torch
from torch import nn

from tests.silent.engines import Engine, batch, mlp


def net() -> nn.Module:
    return mlp()


def program(engine: Engine, rank: int) -> dict[str, torch.Tensor]:
    model = engine.wrap(net())
    optimizer = engine.optimizer(model)
    for step in range(3):
        engine.backward(model(batch(rank, step)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save(engine.inner(model).state_dict(), file)
    file.seek(0)
    fresh = net()
    fresh.load_state_dict(torch.load(file, weights_only=False), strict=False)
    return {name: param.detach() for name, param in fresh.named_parameters()}
