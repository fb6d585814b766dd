"""An optimizer that scales updates by the norms of parameters, as LARS and LAMB do.

Report: https://github.com/deepspeedai/DeepSpeed/issues/490
Right: norms are those of whole parameters.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, mlp, train


class Lars(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    ratio = param.norm() / (param.grad.norm() + 1e-3)
                    param.add_(param.grad * ratio, alpha=-group["lr"])


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(mlp())
    return train(
        engine,
        model,
        rank,
        optimizer=engine.optimizer(model, Lars(model.parameters(), {"lr": 0.1})),
    )
