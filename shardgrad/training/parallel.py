"""The ranks of a run: who we are among them, on which device, and how we talk."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardgrad.diagnosis.flight_recorder import journal
from shardgrad.diagnosis.hang_watchdog import Lookout, OnStall
from shardgrad.training.config import TrainConfig, mesh_shape
from shardgrad.training.failure import UsageError
from shardgrad.training.heap import keep_freed_memory


@dataclass(frozen=True)
class Place:
    """This process among the ranks.

    Args:
        rank: 0 to `world_size - 1`; rank 0 speaks for all.
        world_size: ranks on all machines.
        device: where this rank computes.
        control: a gloo group for small host-side agreements, so that they never wait for the accelerator.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def leads(self) -> bool:
        """Whether this rank writes the files and speaks to the terminal."""
        return self.rank == 0

    def gather(self, values: list[float]) -> list[list[float]]:
        """Every rank's `values` (as many on each), in the order of ranks."""
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        with journal.line(self.control).awaited("exchange of the ranks' numbers", mine):
            dist.all_gather(rows, mine, group=self.control)
        return [row.tolist() for row in rows]

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on some rank."""
        vote = torch.tensor([int(flag)])
        with journal.line(self.control).awaited("vote of the ranks", vote):
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.control)
        return bool(vote.item())

    def tell_all(self, text: str) -> str:
        """Rank 0's `text`, on every rank."""
        box = [text]
        with journal.line(self.control).awaited("words of rank 0"):
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def tell_each_other(self, text: str) -> list[str]:
        """Every rank's `text`, in the order of ranks."""
        texts = [""] * self.world_size
        with journal.line(self.control).awaited("exchange of the ranks' words"):
            dist.all_gather_object(texts, text, group=self.control)
        return texts


def join(config: TrainConfig, *, init_method: str) -> Place:
    """Take this process's place among the ranks that torchrun or the launcher started.

    Args:
        config: for the device and the collectives' time limit.
        init_method: where the ranks meet; `env://` under torchrun.
    """
    journal.enter("start")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    device = _choose_device(config.device, local_rank)
    if device.type == "cpu":
        keep_freed_memory()
        torch.set_num_threads(max(1, available_cores() // local_world_size))
        backend = "gloo"
    else:
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    limit = timedelta(seconds=config.timeout)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    return Place(rank, world_size, device, dist.new_group(backend="gloo", timeout=limit))


def look_out(place: Place, *, stall_s: float, on_stall: OnStall) -> Lookout:
    """Begin to answer other ranks that ask where this one is; see :class:`Lookout`."""
    store = dist.distributed_c10d._get_default_store()
    return Lookout(store, place.rank, place.world_size, stall_s=stall_s, on_stall=on_stall).start()


def build_mesh(place: Place, text: str | None, *, timeout_s: float) -> DeviceMesh:
    """The mesh that `--mesh` describes: one axis to shard over, or an axis of replicas before it.

    Args:
        place: this rank.
        text: as given.
        timeout_s: of collectives; a mesh that makes its own groups gives them half an hour.
    """
    shape = mesh_shape(text) or (place.world_size,)
    room = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    if room != place.world_size:
        raise UsageError(f"--mesh {text} has room for {room} ranks, but {place.world_size} are running.")
    if len(shape) == 1:
        return init_device_mesh(place.device.type, shape, mesh_dim_names=("shard",))
    ranks = torch.arange(room).view(shape)
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timedelta(seconds=timeout_s))[0]
        for rows in (ranks.T, ranks)
    ]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, place.device.type, ranks, mesh_dim_names=names)


def default_ranks(device: str) -> int:
    """Ranks to start where nobody says: one per accelerator, else two if there are two cores."""
    if device != "cpu" and torch.accelerator.is_available():
        return torch.accelerator.device_count()
    return min(2, available_cores())


def available_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_nbytes(device: torch.device) -> int:
    """Memory in use by this rank: resident bytes on CPU, bytes reserved by PyTorch on an accelerator."""
    if device.type != "cpu":
        return torch.accelerator.memory_reserved(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: the peak, which macOS counts in bytes and the BSDs in KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _choose_device(wish: str, local_rank: int) -> torch.device:
    present = torch.accelerator.is_available()
    if wish == "cpu" or (wish == "auto" and not present):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if present else None
    if accelerator is None:
        raise UsageError("PyTorch sees no accelerator here: use --device cpu, or install PyTorch for yours.")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UsageError(f"This machine has {count} accelerators but more ranks: use --ranks {count}.")
    return torch.device(accelerator.type, local_rank)
