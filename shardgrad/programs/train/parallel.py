"""The ranks of a run: process groups, this rank's device, and small host-side collectives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardgrad.diagnosis.flight_recorder import GroupLog, recorder
from shardgrad.programs.train.config import TrainConfig

_Thing = TypeVar("_Thing")


@dataclass(frozen=True)
class World:
    """This rank, and collectives of host values among all ranks.

    Args:
        rank: 0 to `world_size - 1`.
        world_size: number of ranks.
        device: device that this rank trains on. Collectives of host values go over gloo, and
            therefore never wait for an accelerator.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and prints, which is rank 0."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """What the device is called."""
        kind, name = self.device.type, "cpu"
        if kind != "cpu":
            name = torch.get_device_module(kind).get_device_name(self.device)
        return name

    def gather(self, thing: _Thing) -> list[_Thing]:
        """Returns every rank's object, in the order of ranks. A collective."""
        things: list[Any] = [None] * self.world_size
        with _log().waiting("all-gather of the ranks' reports"):
            dist.all_gather_object(things, thing)
        return things

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any rank. A collective."""
        vote = torch.tensor([int(flag)])
        with _log().waiting("vote of the ranks"):
            dist.all_reduce(vote, op=dist.ReduceOp.MAX)
        return bool(vote.item())


def join(config: TrainConfig) -> World:
    """Initializes the process group of a rank."""
    recorder.enter("start")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = _choose_device(config.device, rank)
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
        backend = "gloo"
    else:
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=config.timeout),
        # NCCL's communicator exists from the start then.
        device_id=None if device.type == "cpu" else device,
    )
    return World(rank, world_size, device)


def _log() -> GroupLog:
    return recorder.group_log(dist.distributed_c10d._get_default_group())


def _choose_device(wish: str, rank: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wish == "cpu" or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, rank)
