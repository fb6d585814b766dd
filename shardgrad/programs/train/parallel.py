"""The ranks of a run: process groups, this rank's device, and small host-side collectives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.programs.train.config import TrainConfig


@dataclass(frozen=True)
class World:
    """This rank, and collectives of host values among all ranks.

    Args:
        rank: 0, which writes files and prints, to `world_size - 1`.
        world_size: number of ranks.
        device: device that this rank trains on. Collectives of host values go over gloo, and
            therefore never wait for an accelerator.
    """

    rank: int
    world_size: int
    device: torch.device

    def gather(self, values: Tensor) -> Tensor:
        """Returns every rank's tensor on the host, `[rank, ...]`. A collective."""
        gathered = values.new_empty(self.world_size, *values.shape)
        log = recorder.group_log(dist.distributed_c10d._get_default_group())
        with log.waiting("all-gather of the ranks' reports"):
            dist.all_gather(list(gathered), values)
        return gathered


def join(config: TrainConfig) -> World:
    """Initializes the process group of a rank."""
    recorder.enter("start")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = choose_device(config.device, rank)
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


def choose_device(wish: str, rank: int) -> torch.device:
    """Returns the device of a rank: the accelerator of its number, unless there is none or the wish
    is `cpu`.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wish == "cpu" or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, rank)


def name_of_device(device: torch.device) -> str:
    """Returns what the maker of a device calls it; `cpu` for the CPU."""
    name = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)
    return str(name(device))
