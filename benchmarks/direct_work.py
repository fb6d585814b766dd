"""The rank's side of `direct`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import Cost, cost_of, settle
from shardgrad import fully_shard, ops
from shardgrad.sharding import zero_copy

_UNITS, _WEIGHTS = 2, 4
_WIDTH = 512  # of every weight; its rows follow from its size
_SECTION_NBYTES = 32 * 2**20  # what one timing moves at least, so that it is long enough for the clock


class _Block(nn.Module):
    """Weights of one size, used as briefly as weights can be."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, rows, bias=False) for _ in range(_WEIGHTS))
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + sum(layer(y).mean() for layer in self.layers)


def run(pieces: Sequence[int], rounds: int) -> tuple[dict[tuple[int, str], list[Cost]], str]:
    """Returns costs by (bytes of a rank's piece, way) and round; and the backend of the ops."""
    costs: dict[tuple[int, str], list[Cost]] = {}
    settle()
    for nbytes in pieces:
        repeats = max(1, _SECTION_NBYTES // (nbytes * dist.get_world_size() * _UNITS * _WEIGHTS))
        steps = {way: _step(nbytes, least) for way, least in (("packed", nbytes + 1), ("direct", nbytes))}
        for number in range(rounds):
            for way in steps if number % 2 == 0 else reversed(steps):
                cost = cost_of(steps[way], repeats=repeats, barrier=dist.barrier)
                costs.setdefault((nbytes, way), []).append(cost)
    return costs, ops.backend()


def _step(piece_nbytes: int, least_nbytes: int) -> Callable[[], None]:
    """Builds a model whose weights are direct from `least_nbytes` on, and returns what trains it once."""
    rows = piece_nbytes * dist.get_world_size() // (_WIDTH * torch.float32.itemsize)
    usual, zero_copy.DIRECT_NBYTES = zero_copy.DIRECT_NBYTES, least_nbytes
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Block(rows) for _ in range(_UNITS)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        step = partial(_train, model, torch.randn(1, _WIDTH))
        step()  # lays out gradients, opens connections
    finally:
        zero_copy.DIRECT_NBYTES = usual
    return step


def _train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()
