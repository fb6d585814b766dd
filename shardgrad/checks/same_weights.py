"""Compares, before training begins, the weights that ranks had when their model was sharded.

`fully_shard` keeps this rank's piece of each parameter and drops the rest. If ranks had different
weights, because of different seeds or a checkpoint that only one rank loaded, the model is a
mixture of them (under HSDP its replicas even differ), and the loss does not show it. So
`fully_shard` computes an integer checksum of every parameter before sharding it, at memory
bandwidth, and lazy init compares the checksums, a line of text per parameter, as it compares
descriptions of the model. Parameters that any rank has written since, by loading or by initializing
shards, are not compared; neither are parameters that were on the meta device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardgrad.diagnosis.same_lines import largest, require_same_lines
from shardgrad.engine.param_group import FSDPParam
from shardgrad.engine.unit import Unit
from shardgrad.sharding.dtensor import local_of

# Less than any other checksum, so that the largest is another rank's.
_ROWLESS = torch.iinfo(torch.int64).min

# The checksum of a parameter before it was sharded, and that of this rank's piece.
_noted: weakref.WeakKeyDictionary[FSDPParam, tuple[torch.Tensor, torch.Tensor]] = (
    weakref.WeakKeyDictionary()
)


@contextmanager
def noting_weights(params: Sequence[FSDPParam]) -> Iterator[None]:
    """Notes checksums of parameters that are sharded in this context.

    Streams: the current one; the host does not wait.
    """
    wholes = [_sum(local_of(p.sharded)) for p in params]
    yield
    for p, whole in zip(params, wholes, strict=True):
        piece = _sum(local_of(p.sharded))
        if whole is not None and piece is not None:
            _noted[p] = whole, piece


def _sum(values: torch.Tensor) -> torch.Tensor | None:
    if (
        type(values) not in (torch.Tensor, nn.Parameter)
        or values.is_meta
        or not values.is_contiguous()
    ):
        return None
    octets = values.detach().view(-1).view(torch.uint8)
    if octets.data_ptr() % 8 or octets.storage_offset() % 8:
        octets = octets.clone()  # another rank's may be aligned, and is to have the same checksum
    words = octets.numel() // 8 * 8
    return octets[:words].view(torch.int64).sum() + octets[words:].sum()


def compare_weights(units: Sequence[Unit]) -> None:
    """Compares the checksums of all ranks, on each mesh of the units. A collective.

    Streams: the current one; the host waits.

    Raises:
        RankDisagreementError: weights differ. Raised on every rank of the mesh; names a parameter.
    """
    groups = [group for unit in units for group in unit.groups]
    for mesh in dict.fromkeys(group.mesh for group in groups):
        params = [p for group in groups if group.mesh == mesh for p in group.params]
        checksums = list(map(_unwritten, params))
        for ranks in mesh.comparable_groups:
            unknown = largest([checksum is None for checksum in checksums], ranks)
            most = largest([_ROWLESS if each is None else each for each in checksums], ranks)
            known = [
                f"{p.name} had checksum {highest if checksum == _ROWLESS else checksum}"
                for p, checksum, is_unknown, highest in zip(
                    params, checksums, unknown, most, strict=True
                )
                if not is_unknown
            ]
            require_same_lines(
                known,
                0,
                ranks,
                what="ranks had different weights when fully_shard sharded them",
                fix="torch.manual_seed(0) before building the model, and load weights on every "
                "rank; or, before fully_shard, for tensor in model.state_dict().values(): "
                "torch.distributed.broadcast(tensor, 0)",
            )


def _unwritten(p: FSDPParam) -> int | None:
    """Returns the checksum from before sharding; None if unknown, or the piece was written since.

    `_ROWLESS` on a rank without rows, whose weights are not in the model. Forgets it.
    """
    local = local_of(p.sharded)
    noted, now = _noted.pop(p, None), _sum(local)
    if noted is None or now is None:
        return None
    if local.numel() == 0:
        return _ROWLESS
    whole, piece = noted
    return int(whole) if now.item() == piece.item() else None
