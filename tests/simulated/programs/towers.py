"""A tower on simulated devices, and the batch of a rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from tests.simulated.accelerator.device import NAME
from tests.simulated.accelerator.virtual_ranks import one_at_a_time
from tests.support.parity import ROWS, VOCABULARY, Tower, tower


def sharded_tower(*, on_host: bool = False, **options: Any) -> Tower:
    options = {"mesh": init_device_mesh(NAME, (dist.get_world_size(),))} | options
    with one_at_a_time():
        model = tower()
    model = model if on_host else model.to(NAME)
    for inner in (*model.layers, model.embedding):
        shardgrad.fully_shard(inner, **options)
    return shardgrad.fully_shard(model, **options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Returns this rank's tokens and targets, on the device."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1_000 + step)
    tokens, targets = torch.randint(VOCABULARY, (2, ROWS * world, 5), generator=generator)
    return tokens.chunk(world)[rank].to(NAME), targets.chunk(world)[rank].to(NAME)
