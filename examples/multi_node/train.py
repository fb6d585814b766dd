"""Training on machines that come and go: one replica on each, and a checkpoint after every step.

torchrun starts this program again, on the machines that are there, whenever one leaves or comes.
Each start loads the newest checkpoint, so only the step that was cut short is done again. The batch
of a step is the same whatever the number of ranks; each takes its part. A run that lost a machine
gives the weights of one that did not.

    torchrun --nnodes 1:2 ... examples/multi_node/train.py --folder /shared/run --steps 1000

`--folder` is a folder that all machines see. `launch.sh` beside this file has the rest of the
command.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardgrad import fully_shard

BATCH = 8  # rows of a step, over all ranks; a multiple of any number of them
WIDTH = 16


def build() -> nn.Sequential:
    """The model, with the same weights wherever it is built."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def batch(step: int) -> Tensor:
    """The rows of a step, for all ranks."""
    return torch.randn(
        BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
    )


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Learn to reverse a row."""
    return (model(rows) - rows.flip(-1)).square().mean()


def one_replica_a_machine(device: str) -> DeviceMesh:
    """Shards within a machine, replicates over machines: only gradients, already cut, travel
    between them.
    """
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh(
        device, (dist.get_world_size() // local, local), mesh_dim_names=("replicate", "shard")
    )


class Checkpoints:
    """One folder a step, and a file that names the newest complete one."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer
        self._newest = folder / "newest"

    def load(self) -> int:
        """Loads the newest one, cut for any number of ranks; returns the steps it has behind it."""
        if not self._newest.exists():
            return 0
        name = self._newest.read_text()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=self._folder / name)
        set_state_dict(
            self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        return int(name)

    def save(self, steps: int) -> None:
        """Saves, and then says so: a run that ends in between finds the one before."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        dcp.save(
            {"model": model, "optimizer": optimizer}, checkpoint_id=self._folder / f"{steps:06}"
        )
        if dist.get_rank() == 0:
            beside = self._folder / "newest.part"
            beside.write_text(f"{steps:06}")
            beside.rename(self._newest)
        dist.barrier()


def is_stopped(folder: Path) -> bool:
    """Whether there is a file `stop`; rank 0 looks, so that all ranks find the same."""
    box = [(folder / "stop").exists()]
    dist.broadcast_object_list(box)
    return box[0]


def main() -> None:
    """Trains until `--steps` are done, or somebody puts a file `stop` into the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_s))
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model, mesh = build().to(device), one_replica_a_machine(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = Checkpoints(options.folder, model, optimizer)
    first = checkpoints.load()

    for step in range(first, options.steps):
        loss = loss_of(model, batch(step).chunk(ranks)[rank].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step + 1)
        if rank == 0:
            print(f"step {step + 1} on {ranks} ranks: loss {loss.item():.4f}", flush=True)
        if is_stopped(options.folder):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
