"""A model of many small units, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Chain(nn.Module):
    """`units` modules in a row.

    Args:
        count: units.
        layers: square linear layers with bias in each; more than one get a scale as well.
    """

    width = 16

    def __init__(self, count: int, layers: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Link(self.width, layers) for _ in range(count))

    def forward(self, inputs: Tensor) -> Tensor:
        for unit in self.units:
            inputs = unit(inputs)
        return inputs


class _Link(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width)) if layers > 1 else None

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs if self.scale is None else inputs * self.scale
