"""Train on a changing set of machines: one replica on each, and a checkpoint after every step.

Whenever a machine leaves or joins, torchrun restarts this program on the available machines. Each
start loads the newest checkpoint, so only the interrupted step is repeated. The batch of a step
does not depend on the number of ranks; each rank takes its part. So a run that lost a machine ends
with the weights of one that did not.

    torchrun --nnodes 1:2 ... examples/multi_node/train.py --folder /shared/run --steps 1000

`--folder` must be visible to all machines. `launch.sh`, next to this file, has the rest of the
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
    """Returns the model, with the same weights on every rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def batch(step: int) -> Tensor:
    """Returns the rows of a step, for all ranks."""
    return torch.randn(
        BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
    )


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Returns the loss: the model learns to reverse a row."""
    return (model(rows) - rows.flip(-1)).square().mean()


def one_replica_a_machine(device: str) -> DeviceMesh:
    """Returns a mesh that shards within a machine and replicates over machines, so that only
    reduce-scattered gradients are sent between machines.
    """
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh(
        device, (dist.get_world_size() // local, local), mesh_dim_names=("replicate", "shard")
    )


class Checkpoints:
    """Manages one folder per step, and a file that names the newest complete one."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer
        self._newest = folder / "newest"

    def load(self) -> int:
        """Loads the newest checkpoint onto any number of ranks; returns its number of steps."""
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
        """Saves, then names the checkpoint: if the run dies in between, the previous one counts."""
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
    """Returns whether a file `stop` exists. Rank 0 checks, so that all ranks agree."""
    box = [(folder / "stop").exists()]
    dist.broadcast_object_list(box)
    return box[0]


def main() -> None:
    """Trains for `--steps` steps, or until a file `stop` appears in the folder."""
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
