"""Compares replicas (HSDP) by checksums of parameters, gradients and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from shardgrad.checks.same_weights import of_each_rank
from shardgrad.engine.param import managed_by
from shardgrad.engine.param_group import group_of
from shardgrad.engine.streams import wait_for_device
from shardgrad.engine.unit import unit_of
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["ReplicaReport", "checksum", "replica_report"]


@dataclass(frozen=True)
class ReplicaReport:
    """The differences between ranks that should hold the same values.

    Attributes:
        ranks: the compared ranks: the replicas of this rank's shards.
        differing: name, for example "parameter layers.0.up.weight" -> for each distinct content,
            its ranks.
    """

    ranks: tuple[int, ...]
    differing: dict[str, tuple[tuple[int, ...], ...]]

    def __str__(self) -> str:
        rows = [
            f"{what} differs between the replicas on ranks {' and '.join(map(_in_words, parties))}"
            for what, parties in self.differing.items()
        ]
        return "\n".join(rows) or "all replicas are equal"


@torch.no_grad()
def replica_report(model: nn.Module, optimizer: Optimizer | None = None) -> ReplicaReport:
    """Compares checksums of each shard's replicas (HSDP). A collective of the replicas.

    Reads every value once, on the device, and sends eight bytes per tensor; the host waits for
    both. Without replicas, nothing is computed and the report is empty. Two different contents have
    the same checksum with a probability of about 2^-32.

    For example:

        print(shardgrad.replica_report(model, optimizer))

    Args:
        model: the root. Parameters that a unit shards over another mesh than the root's are
            omitted.
        optimizer: an optimizer whose state is also compared.

    Streams: the current stream. Capture: not safe, because the host reads the result.
    """
    unit = unit_of(model)
    group = None if unit is None else unit.mesh.replicate_group
    if unit is None or group is None or group.size() == 1:
        return ReplicaReport((dist.get_rank(),) if dist.is_initialized() else (0,), {})
    device = unit.mesh.device
    wait_for_device(device)  # states may be on their way to the host
    contents = _contents(model, optimizer, unit.mesh)
    own = torch.stack([checksum(tensor).to(device) for tensor in contents.values()])
    of_ranks = of_each_rank(own, group, "checksums of the replicas")
    differing: dict[str, tuple[tuple[int, ...], ...]] = {}
    for number in (torch.stack([*of_ranks.values()]) != own).any(0).nonzero().flatten().tolist():
        parties: dict[int, list[int]] = {}
        for rank, row in of_ranks.items():
            parties.setdefault(int(row[number]), []).append(rank)
        differing[list(contents)[number]] = tuple(map(tuple, parties.values()))
    return ReplicaReport(tuple(of_ranks), differing)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an int64 device scalar that depends on every bit of the tensor; 0 for an
    empty one.
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return torch.hash_tensor(tensor).view(torch.int64)


def _contents(
    model: nn.Module, optimizer: Optimizer | None, mesh: DataParallelMesh
) -> dict[str, torch.Tensor]:
    """Returns the local tensors that must be equal on all replicas, by description."""
    found: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        managed = managed_by(param)
        if managed is not None and group_of(managed).mesh != mesh:
            continue
        found[f"parameter {name}"] = _local(param)
        if param.grad is not None:
            found[f"gradient of {name}"] = _local(param.grad)
        state = {} if optimizer is None else optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer state {key} of {name}"] = _local(value)
    return {what: tensor for what, tensor in found.items() if tensor.numel()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _in_words(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
