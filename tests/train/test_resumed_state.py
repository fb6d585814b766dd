"""A run that goes on from a checkpoint does what the uninterrupted one does, also where it draws
numbers.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardgrad
from shardgrad.programs.checkpoint import Series
from shardgrad.programs.train.checkpoint import TrainState, load_state, save_state
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.model import Transformer, materialise
from shardgrad.programs.train.parallel import World
from shardgrad.programs.train.presets import TransformerConfig
from shardgrad.programs.train.step import TrainStep, build_optimizer
from tests.support.ranks import Ranks
from tests.support.under_patch import shared_folder

CPU = torch.device("cpu")
CONFIG = TrainConfig(steps=9, seq_len=8, batch_size=2, lr=1e-2)
HALF, STEPS = 2, 5


class DroppingOut(Transformer):
    """A transformer that draws numbers in every forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.dropout(super().forward(tokens), 0.5, self.training)


def fresh(world: World) -> TrainState:
    with torch.device("meta"):
        model = DroppingOut(TransformerConfig(width=16, layers=2, heads=2, kv_heads=2, hidden=16))
    materialise(model, model, device=CPU, seed=0)
    mesh = init_device_mesh("cpu", (world.world_size,))
    for module in (*model.layers, model):
        shardgrad.fully_shard(module, mesh=mesh)
    return TrainState(model, build_optimizer(model, CONFIG))


def losses(state: TrainState, world: World, until: int) -> list[float]:
    text = torch.randint(256, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    step = TrainStep(state, Sampler(text, CONFIG.seq_len, seed=0), CONFIG, world)
    return [step()[0].item() for _ in range(until - state.step)]


def resumed_with_dropout() -> list[float]:
    """Returns what this rank drew on, after it has been checked that the resumed run repeats it."""
    group = dist.group.WORLD
    assert group is not None
    world = World(dist.get_rank(), dist.get_world_size(), CPU, group)
    torch.manual_seed(7 + world.rank)
    state = fresh(world)
    losses(state, world, HALF)
    with shared_folder() as folder:
        series = Series(Path(folder), keep=1)
        save_state(series, state, world)
        uninterrupted = losses(state, world, STEPS)
        torch.manual_seed(99)
        again = fresh(world)
        load_state(series, again, world)
        assert (again.step, again.samples) == (HALF, HALF * CONFIG.global_batch(world.world_size))
        assert losses(again, world, STEPS) == uninterrupted
        series.release()
    for ours, theirs in zip(again.model.parameters(), state.model.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())
    return nn.functional.dropout(torch.ones(64)).tolist()


def test_a_resumed_run_draws_on_where_each_rank_had_stopped(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(resumed_with_dropout)
    assert first != second
