"""Models, data, and the oracle of the tests of graphed steps: the same program without a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, one_at_a_time
from tests.support.graphed import Graphed, Program, eager, require_same, step_of, values_of
from tests.support.parity import judged_by

WIDTH = 6


# -- models and data


class Block(nn.Module):
    """Two layers, and a branch that may stay away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.uses_spare = False

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.tanh(self.first(x)))
        return x + self.spare(x) if self.uses_spare else x


def build(depth: int = 3, *, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Sequential:
    """Returns the model, sharded block by block."""
    mesh = init_device_mesh(NAME, (dist.get_world_size(),))
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(depth))).to(NAME, dtype)
    for block in model:
        shardgrad.fully_shard(block, mesh=mesh, **options)
    torch.get_device_module(NAME).manual_seed(dist.get_rank())
    return shardgrad.fully_shard(model, mesh=mesh, **options)


def batch(number: int, rows: int = 4) -> Tensor:
    """Returns this rank's data of a step, on the device."""
    generator = torch.Generator().manual_seed(1_000 * number + dist.get_rank())
    return torch.randn(rows, WIDTH, generator=generator).to(NAME)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(0)).square().mean()


def training_step(graphed: Graphed, model: nn.Module, **settings: Any) -> Any:
    """Returns the step that most programs take, which trains on a batch and returns its loss."""
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    return graphed(model, optimizer, **settings)(step_of(model, optimizer))


# -- the oracle: the same program without a graph


def both(program: Program, *args: Any) -> None:
    """Asserts that a program gives the same values with and without graphs, and has no hazard."""
    runs = []
    for graphed in (eager, shardgrad.graphed_step):
        with checked():
            runs.append(values_of(program(graphed, *args)))
    require_same(*runs)


def same_on(ranks: int, program: Program, *args: Any) -> None:
    """Runs `both` on virtual ranks."""
    VirtualRanks(ranks).run(both, program, *args)


def same_bits_as_eager(ranks: int) -> Callable[[Program], Callable[..., None]]:
    """Makes a test of a program that is given `graphed_step`, or what stands for it: `same_on`."""

    def judge(program: Program, **parameters: Any) -> None:
        same_on(ranks, partial(program, **parameters))

    return partial(judged_by, judge)
