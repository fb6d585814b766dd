"""One rank has no image in its batch, so the image tower has no gradient there.

Report: https://github.com/huggingface/transformers/issues/37186
Right: the tower's gradient is the other rank's, halved.
"""

import torch
from torch import nn

from tests.silent.engines import Engine, batch, train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, image: bool) -> torch.Tensor:
        return self.text(x) + self.image(x) if image else self.text(x)


def program(engine: Engine, rank: int) -> nn.Module:
    model = engine.wrap(Net(), units=[])
    return train(engine, model, lambda step: model(batch(rank, step), rank == 0).square().mean())
