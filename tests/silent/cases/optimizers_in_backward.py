"""Each parameter has its own optimizer, which steps in a hook as soon as the gradient is there.

Report: https://github.com/kohya-ss/musubi-tuner/issues/679
Right: each steps with the averaged gradient.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    engine.optimizer(model)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step_at_once(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    engine.on_gradient(model, step_at_once)
    for step in range(3):
        engine.backward(squares(model, rank, step), model)
    return model
