"""Compares, before training begins, the weights that ranks had when their model was sharded.

`fully_shard` keeps this rank's piece of each parameter and drops the rest. If ranks had different
weights, because of different seeds or a checkpoint that only one rank loaded, the model is a
mixture of them (under HSDP its replicas even differ), and the loss does not show it. So
`fully_shard` computes an integer checksum of every parameter before sharding it, at memory
bandwidth, and lazy init compares the checksums in one all-reduce of a few bytes per parameter.
Parameters that any rank has written since, by loading or by initialising shards, are not compared;
neither are parameters that were on the meta device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.param import FSDPParam, local_of
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.unit import Unit
from shardgrad.errors import RankDisagreementError, listed

__all__ = ["compare_weights", "weights_before"]

_MASK = 2**62 - 1  # a sum and its negative are both int64


# The checksum of a parameter before it was sharded, and that of this rank's piece.
_noted: weakref.WeakKeyDictionary[FSDPParam, tuple[torch.Tensor, torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)


@torch.no_grad()
def weights_before(params: Sequence[FSDPParam]) -> Callable[[], None]:
    """Computes checksums of parameters that are about to be sharded. Returns a function that stores
    them once they are.

    Streams: the current one; the host does not wait.
    """
    wholes = [_sum(getattr(p.sharded, "_local_tensor", p.sharded)) for p in params]

    @torch.no_grad()
    def note() -> None:
        for p, whole in zip(params, wholes, strict=True):
            piece = _sum(local_of(p.sharded))
            if whole is not None and piece is not None:
                _noted[p] = whole, piece

    return note


def _sum(values: torch.Tensor) -> torch.Tensor | None:
    if (
        type(values) not in (torch.Tensor, nn.Parameter)
        or values.is_meta
        or not values.is_contiguous()
    ):
        return None
    octets = values.detach().view(-1).view(torch.uint8)
    if octets.data_ptr() % 8 or (octets.storage_offset() % 8):
        return octets.sum()
    words = octets.numel() // 8 * 8
    return octets[:words].view(torch.int64).sum() + octets[words:].sum()


@torch.no_grad()
def compare_weights(units: Sequence[Unit]) -> None:
    """Compares the checksums of all ranks: one collective over each mesh of the units. Skips
    parameters that were on the meta device.

    Raises:
        RankDisagreementError: weights differ. Raised on every rank of the mesh; names a parameter,
            and which ranks had which values.
    """
    groups = [group for unit in units for group in unit.groups]
    for mesh in dict.fromkeys(group.mesh for group in groups):
        on_mesh = [group for group in groups if group.mesh == mesh]
        for ranks in (mesh.shard_group, mesh.replicate_group):
            if ranks is not None and ranks.size() > 1 and dist.get_backend(ranks) != "fake":
                _compare(on_mesh, ranks, mesh.device)
    for group in groups:
        for p in group.params:
            _noted.pop(p, None)


def _compare(groups: Sequence[ParamGroup], ranks: dist.ProcessGroup, device: torch.device) -> None:
    params = [p for group in groups for p in group.params]
    own, is_unknown = torch.stack([_whole_and_unknown(p, device) for p in params]).unbind(1)
    largest = torch.stack([own, -own, is_unknown])
    with recorder.group_log(ranks).waiting("checksums of the weights"):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks)
    differs = (largest[0] != -largest[1]) & (largest[2] == 0)
    numbers = differs.nonzero().flatten().tolist()
    if numbers:
        raise _error([params[i].name for i in numbers], own[numbers[0]], ranks)


def _whole_and_unknown(p: FSDPParam, device: torch.device) -> torch.Tensor:
    """Returns the checksum from before sharding, and 1 if it is unknown or the piece was written
    since.
    """
    noted, now = _noted.get(p), _sum(local_of(p.sharded))
    if noted is None or now is None:
        return torch.tensor([0, 1], dtype=torch.int64, device=device)
    whole, piece = noted
    is_written = now.to(device) != piece.to(device)
    return torch.stack([whole.to(device) & _MASK, is_written.to(torch.int64)])


def _error(
    names: Sequence[str], own: torch.Tensor, ranks: dist.ProcessGroup
) -> RankDisagreementError:
    totals = [torch.empty_like(own) for _ in range(ranks.size())]
    with recorder.group_log(ranks).waiting("checksums of the weights"):
        dist.all_gather(totals, own, group=ranks)
    parties: dict[int, list[int]] = {}
    for rank, total in zip(dist.get_process_group_ranks(ranks), totals, strict=True):
        parties.setdefault(int(total), []).append(rank)
    return RankDisagreementError(
        f"ranks had different weights when fully_shard sharded them: {listed(names, 1)}",
        expected=f"the same values on every rank of {dist.get_process_group_ranks(ranks)}",
        got=f"{len(parties)} different values, on ranks "
        + " / ".join(listed(party, 8) for party in parties.values()),
        where=f"rank {dist.get_rank()}, parameter {names[0]}",
        fix="torch.manual_seed(0) before building the model, and load weights on every rank; or, "
        "before fully_shard, for tensor in model.state_dict().values(): "
        "torch.distributed.broadcast(tensor, 0)",
    )
