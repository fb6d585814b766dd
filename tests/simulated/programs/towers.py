"""A tower on simulated devices, and the batch of a rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.simulated.accelerator.device import NAME
from tests.simulated.accelerator.virtual_ranks import one_at_a_time
from tests.support.parity import SHARDGRAD, Tower, tower


def sharded_tower(*, on_host: bool = False, **options: Any) -> Tower:
    options = {"mesh": init_device_mesh(NAME, (dist.get_world_size(),))} | options
    with one_at_a_time():
        model = tower()
    return SHARDGRAD.shard_tower(model if on_host else model.to(NAME), **options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Returns this rank's tokens and targets, on the device."""
    tokens, targets = SHARDGRAD.tokens(step)
    return tokens.to(NAME), targets.to(NAME)
