"""The norm that clipping returns is logged.

Report: https://github.com/pytorch/pytorch/issues/170862
Right: it is the norm of the whole gradient.
"""

import torch

from tests.silent.engines import Engine, batch, mlp


def program(engine: Engine, rank: int) -> dict[str, float]:
    model = engine.wrap(mlp())
    engine.optimizer(model)
    engine.backward(model(batch(rank, 0)).square().sum(), model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {"gradient norm": norm.item() / 10}
