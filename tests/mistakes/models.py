"""What the programs share: small models as users write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardgrad

WIDTH = 8


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)

    def loss(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x)).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def sharded(model: Net | None = None) -> Net:
    """A unit for each block, and the root."""
    model = net() if model is None else model
    for block in model.blocks:
        shardgrad.fully_shard(block)
    return shardgrad.fully_shard(model)


def batch() -> Tensor:
    return torch.ones(2, WIDTH)


def backward(model: nn.Module) -> None:
    model(batch()).square().mean().backward()
