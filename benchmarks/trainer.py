"""The training program's step on a rank of a benchmark, without its command line."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardgrad.programs.train.checkpoint import TrainState
from shardgrad.programs.train.config import TrainConfig
from shardgrad.programs.train.corpus import Sampler
from shardgrad.programs.train.optimizer import build_optimizer, build_schedule
from shardgrad.programs.train.parallel import World
from shardgrad.programs.train.sharding import build_model
from shardgrad.programs.train.step import TrainStep


def make_step(config: TrainConfig, device: str) -> tuple[TrainStep, World]:
    """Returns a step of the training program on random text, and this rank's world.

    Args:
        config: of the run.
        device: where this rank computes.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = World(rank, ranks, torch.device(device), dist.new_group(backend="gloo"))
    model = build_model(config, init_device_mesh(world.device.type, (ranks,)), world.device)
    optimizer = build_optimizer(model, config)
    state = TrainState(model, optimizer, build_schedule(optimizer, config))
    text = torch.randint(
        256, (10_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return TrainStep(state, Sampler(text, config.seq_len, seed=0), config, world), world
