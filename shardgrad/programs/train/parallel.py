"""The ranks of a run: process groups, this rank's device, and small host-side collectives."""

from __future__ import annotations

import dataclasses
import os
import resource
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.diagnosis.same_lines import require_same_lines
from shardgrad.errors import RankDisagreementError
from shardgrad.programs.train.config import TrainConfig, mesh_shape
from shardgrad.programs.train.failure import UsageError
from shardgrad.programs.train.launcher import available_cores

_Thing = TypeVar("_Thing")

# In a larger world a gloo group connects two ranks when one first sends to the other. If all
# connected at the start, every rank would read every other's address from the one store.
_FULL_MESH_RANKS = 256


@dataclass(frozen=True)
class World:
    """This rank, and collectives of host values among all ranks.

    Args:
        rank: 0 to `world_size - 1`.
        world_size: number of ranks on all machines.
        device: device that this rank trains on.
        control: a gloo group for host-side collectives, which therefore never wait for the
            accelerator.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def leads(self) -> bool:
        """Whether this rank writes files and prints, which is rank 0."""
        return self.rank == 0

    def gather(self, thing: _Thing) -> list[_Thing]:
        """Returns every rank's object, in the order of ranks. A collective."""
        things: list[Any] = [None] * self.world_size
        with recorder.group_log(self.control).waiting("all-gather of the ranks' reports"):
            dist.all_gather_object(things, thing, group=self.control)
        return things

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any rank. A collective."""
        vote = torch.tensor([int(flag)])
        with recorder.group_log(self.control).waiting("vote of the ranks", vote):
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.control)
        return bool(vote.item())


def join(config: TrainConfig) -> World:
    """Initializes the process groups of a rank.

    Args:
        config: settings; the device and the timeout are used.
    """
    recorder.enter("start")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = _choose_device(config.device, local_rank)
    if device.type == "cpu":
        torch.set_num_threads(max(1, available_cores() // local_world_size))
        backend = "gloo"
    else:
        torch.accelerator.set_device_index(device.index)
        # The axes of a mesh may be in one graph (`graphs/preflight.py`); NCCL reads it once.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    limit = timedelta(seconds=config.timeout)
    if world_size > _FULL_MESH_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(
        backend,
        timeout=limit,
        # NCCL's communicator exists from the start then, and a mesh splits it: one call for each
        # axis, instead of a group for each of its lines.
        device_id=None if device.type == "cpu" else device,
    )
    return World(rank, world_size, device, dist.new_group(backend="gloo", timeout=limit))


def require_same_settings(
    world: World, config: TrainConfig, folder: Path, digest: str, *, resume: bool
) -> Path:
    """Refuses ranks that a launcher started with different settings, or that have read different
    texts under one name. A collective.

    Returns:
        The run folder: ranks of torchrun each derive its name from their clock; all use rank 0's.

    Raises:
        UsageError: on every rank; it names a rank and what it was given.
    """
    settings = {**dataclasses.asdict(config), "resume": resume}
    del settings["run_dir"]
    lines = [f"--{name.replace('_', '-')} is {value}" for name, value in settings.items()]
    lines.append(f"the text of --data has SHA-256 {digest}")
    try:
        require_same_lines(lines, 0, world.control)
    except RankDisagreementError as error:
        raise UsageError(
            f"The ranks have different settings: {error.got}, and {error.expected}. Start all with "
            "the same."
        ) from None
    return Path(world.gather(str(folder))[0])


def build_mesh(world: World, text: str | None, *, timeout_s: float) -> DeviceMesh:
    """Creates the mesh that `--mesh` describes: a shard axis, optionally after a replicate axis.

    Args:
        world: this rank.
        text: value of `--mesh`; None shards over all ranks.
        timeout_s: timeout of collectives. `init_device_mesh` would give its groups the default of
            30 minutes.
    """
    shape = mesh_shape(text, world.world_size) or (world.world_size,)
    if len(shape) == 1:
        return init_device_mesh(world.device.type, shape, mesh_dim_names=("shard",))
    ranks = torch.arange(world.world_size).view(shape)
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timedelta(seconds=timeout_s))[0]
        for rows in (ranks.T, ranks)
    ]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=names)


def default_ranks(config: TrainConfig) -> int:
    """Returns the default number of ranks: one per accelerator, else two if there are two cores."""
    if config.device != "cpu" and torch.accelerator.is_available():
        return torch.accelerator.device_count()
    return min(2, available_cores())


def memory_nbytes(device: torch.device) -> int:
    """Returns this rank's memory: resident bytes on CPU, bytes reserved by PyTorch on an
    accelerator.
    """
    if device.type != "cpu":
        return torch.accelerator.memory_reserved(device)
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def _choose_device(wish: str, local_rank: int) -> torch.device:
    present = torch.accelerator.is_available()
    if wish == "cpu" or (wish == "auto" and not present):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if present else None
    if accelerator is None:
        raise UsageError(
            "PyTorch sees no accelerator here: use --device cpu, or install PyTorch for yours."
        )
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UsageError(
            f"This machine has {count} accelerators but more ranks: use --ranks {count}."
        )
    return torch.device(accelerator.type, local_rank)
