"""Each part is wrapped if its shard size is above one; that of one part is one.

Report: https://github.com/nvidia-cosmos/cosmos-predict2.5/issues/143
Right: that part is averaged too, or refused by name.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, train

SHARD_SIZE = {"encoder": 2, "net": 1}


class Pipeline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.net = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.encoder(x).tanh())


def program(engine: Engine, rank: int) -> dict[str, torch.Tensor]:
    model = Pipeline()
    for name, size in SHARD_SIZE.items():
        if size > 1:
            setattr(model, name, engine.wrap(getattr(model, name)))
    train(engine, model, rank)
    return dict(model.net.named_parameters())
