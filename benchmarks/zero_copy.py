"""From which size on does a parameter travel faster by itself than packed with others?

A step of a few units whose weights all have the same size, once with every weight in a message by
itself and once with all packed, on the same ranks, round by round in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import click
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure import Cost, interleaved, over_ranks, samples_of, summarise
from benchmarks.run import Run, option
from benchmarks.workers import on_ranks
from shardgrad import fully_shard
from shardgrad.sharding import zero_copy

_KIB = 2**10
_UNITS, _WEIGHTS = 2, 4
_WIDTH = 512  # of every weight; its rows follow from its size
# What one timing moves at least, so that it is long enough for the clock.
_SECTION_NBYTES = 32 * 2**20


@click.command()
@option(
    "--ranks",
    "worlds",
    type=click.IntRange(2),
    multiple=True,
    default=[2, 4],
    help="Processes; repeatable.",
)
@option("--rounds", type=click.IntRange(2), default=21, help="Turns of each way.")
@click.pass_obj
def main(run: Run, worlds: Sequence[int], rounds: int) -> None:
    """Measure both ways for shards of 64 KiB to 8 MiB of a parameter, in fp32."""
    shards = [64 * _KIB * 2**power for power in range(8)]
    if run.smoke:
        worlds, rounds, shards = [2], 2, shards[:2]
    for ranks in worlds:
        costs = over_ranks(on_ranks("benchmarks.zero_copy:measure", ranks, shards, rounds))
        run.finish(
            "zero_copy",
            config={"ranks": ranks, "rounds": rounds, "shard_nbytes": shards},
            samples=samples_of(costs),
            summary=summarise(costs, "packed"),
        )


def measure(shards: Sequence[int], rounds: int) -> dict[int, dict[str, list[Cost]]]:
    """Returns a rank's costs by bytes of its shard of a weight, and way."""
    costs = {}
    for nbytes in shards:
        repeats = max(1, _SECTION_NBYTES // (nbytes * dist.get_world_size() * _UNITS * _WEIGHTS))
        steps = {
            way: _step(nbytes, least)
            for way, least in (("packed", nbytes + 1), ("zero copy", nbytes))
        }
        costs[nbytes] = interleaved(steps, rounds, repeats=repeats, barrier=dist.barrier)
    return costs


class _Block(nn.Module):
    """Weights of one size, used as briefly as weights can be."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, rows, bias=False) for _ in range(_WEIGHTS))
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + sum(layer(y).mean() for layer in self.layers)


def _step(shard_nbytes: int, least_nbytes: int) -> Callable[[], None]:
    """Builds a model whose weights go without a copy from `least_nbytes` on; returns what trains it
    once.
    """
    rows = shard_nbytes * dist.get_world_size() // (_WIDTH * torch.float32.itemsize)
    with mock.patch.object(zero_copy, "ZERO_COPY_NBYTES", least_nbytes):
        torch.manual_seed(0)
        model = nn.Sequential(*(_Block(rows) for _ in range(_UNITS)))
        for block in (*model, model):
            fully_shard(block)
        step = partial(_train, model, torch.randn(1, _WIDTH))
        step()  # lays out gradients, opens connections
    return step


def _train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()
