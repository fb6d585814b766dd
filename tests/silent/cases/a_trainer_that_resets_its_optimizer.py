"""ReLoRA: the optimizer's state is cleared in the middle of training.

Report: https://github.com/deepspeedai/DeepSpeed/issues/5615
Right: moments begin again from zero.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, squares


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    optimizer = engine.optimizer(model, torch.optim.Adam, lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.state.clear()
        engine.backward(squares(model, rank, step), model)
        optimizer.step()
        optimizer.zero_grad()
    return model
