"""The norm that clipping returns is logged.

Report: https://github.com/pytorch/pytorch/issues/170862
Right: it is the norm of the whole gradient.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch


def program(engine: Engine, rank: int) -> dict[str, float]:
    model = engine.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    engine.optimizer(model)
    engine.backward(model(batch(rank, 0)).square().sum(), model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {"gradient norm": norm.item() / 10}
