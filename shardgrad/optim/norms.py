"""Norms over gradients, without a host read: one pass over each shard, then one small all-reduce.

The parts of shards with the same group of ranks are summed before the all-reduce, so a model on one
mesh needs a single message of two numbers. Replicas (HSDP) hold the same gradients and are not
counted twice. Sums are float64 and their order is fixed, so a norm has the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.transports import backend_for
from shardgrad.errors import GradientError, OptionError
from shardgrad.ops.norm import NORM_SCRATCH_NUMEL, norm_
from shardgrad.ops.segments import segment_rows
from shardgrad.optim.selection import Gradients
from shardgrad.sharding.param_sharding import groups_cut_over

_WHAT = "all-reduce of the gradients' norm"

# A norm's sum and its count of non-finite elements, by the process groups over which both must be
# reduced, and the device.
_Sums = dict[tuple[tuple[dist.ProcessGroup, ...], torch.device], torch.Tensor]


def norm_of(
    gradients: Gradients, norm_type: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a norm over all gradients of all ranks.

    Args:
        gradients: the gradients of this rank.
        norm_type: 0, a positive number, or an infinity.
        device: the device of the result if there are no gradients.

    Returns:
        (norm, nonfinite), device scalars, the same on every rank. `norm` is float64 if a gradient
        is, else float32. `nonfinite` is float32, above zero if any element or the norm is an
        infinity or a NaN. The shards store `nonfinite` with each of these gradients. The next norm
        of the same gradients overwrites it.

    Streams: the current stream, which waits for the collectives.
    Capture: safe once the process group has been used.

    Raises:
        OptionError: an unknown kind of norm.
    """
    if math.isnan(norm_type) or (norm_type < 0 and not math.isinf(norm_type)):
        raise OptionError(
            "norm_type is not supported",
            expected="0, a positive number, or an infinity",
            got=repr(norm_type),
            fix="norm_type=2.0",
        )
    sums = _local_sums(gradients, norm_type)
    if not sums:
        zero = torch.zeros((), dtype=torch.float32, device=device)
        return zero, zero
    total, count = _over_ranks(sums, norm_type).unbind()
    norm = total if norm_type == 0 or math.isinf(norm_type) else total.pow(1.0 / norm_type)
    nonfinite = ((count > 0) | ~torch.isfinite(norm)).float()
    if gradients.selections:
        key = tuple((id(selection.shard), selection.places) for selection in gradients.selections)
        first = gradients.selections[0].shard
        nonfinite = _verdict_of(first, key, nonfinite.device).copy_(nonfinite)
    for selection in gradients.selections:
        selection.shard.judge(nonfinite, selection.live)
    known = [selection.shard.flat for selection in gradients.selections] + gradients.plain
    is_double = any(grad.dtype == torch.float64 for grad in known)
    return norm.to(torch.float64 if is_double else torch.float32), nonfinite


def find_nonfinite(gradients: Gradients, device: torch.device) -> torch.Tensor:
    """Returns a float32 device scalar, above zero on every rank if a gradient of any rank is not
    finite.

    Reuses the verdicts of norms that have checked all of these gradients since they were reduced.

    Streams and capture: as `norm_of`.
    """
    live = [
        (chosen.shard.judged, place) for chosen in gradients.selections for place in chosen.live
    ]
    if gradients.plain or not live or not all(place in judged for judged, place in live):
        return norm_of(gradients, math.inf, device)[1]
    first, *others = dict.fromkeys(judged[place] for judged, place in live)
    return sum(others, first)


# By the first shard of a norm and the norm's selections.
_verdicts: WeakKeyDictionary[GradShard, dict[Hashable, torch.Tensor]] = WeakKeyDictionary()


def _verdict_of(shard: GradShard, key: Hashable, device: torch.device) -> torch.Tensor:
    """Returns the device scalar that stores whether gradients are finite.

    Its address is constant, since a graph may read what another graph or eager code wrote.
    """
    known = _verdicts.setdefault(shard, {})
    if key not in known:
        with torch.inference_mode(mode=False):
            known[key] = torch.zeros((), dtype=torch.float32, device=device)
    return known[key]


def _local_sums(gradients: Gradients, norm_type: float) -> _Sums:
    """Adds up what this rank has.

    One shard after the other: a shard without gradients, which has memory in a graph and none in an
    eager step, then changes no bit of the sum.
    """
    sums: _Sums = {}
    scratch: dict[torch.device, torch.Tensor] = {}

    def add(
        flat: torch.Tensor,
        touched: torch.Tensor,
        groups: tuple[dist.ProcessGroup, ...],
        table: torch.Tensor,
        tiles: int,
    ) -> None:
        device = flat.device
        if device not in scratch:
            numel = NORM_SCRATCH_NUMEL
            scratch[device] = torch.zeros(numel, dtype=torch.float64, device=device)
        if (groups, device) not in sums:
            start = torch.zeros(2, dtype=torch.float64, device=device)
            if norm_type == -math.inf:
                start[0].fill_(math.inf)
            sums[groups, device] = start
        norm_(
            sums[groups, device],
            scratch[device],
            flat=flat,
            touched=touched,
            rows=table,
            tiles=tiles,
            norm_type=norm_type,
        )

    for selection in gradients.selections:
        shard = selection.shard
        for part in _tables_of(shard, selection.places):
            add(shard.flat, shard.flags, *part)
    for grad in gradients.plain:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            groups = groups_cut_over(grad.device_mesh, grad.placements)
            grad = grad.to_local()
        if grad.layout is not torch.strided:
            raise GradientError(
                "a gradient is not dense, so its norm cannot be computed",
                expected="a dense gradient",
                got=f"layout {grad.layout}, shape {tuple(grad.shape)}",
                fix="sparse=False in the embedding",
            )
        flat = grad.detach().contiguous().view(-1)
        one = torch.ones(1, dtype=torch.float32, device=flat.device)
        add(flat, one, groups, *_table_of_one(flat.numel(), flat.device))
    return sums


# By shard and places. Cached so that the tables are on the device before a capture.
_Table = tuple[tuple[dist.ProcessGroup, ...], torch.Tensor, int]
_tables: WeakKeyDictionary[GradShard, dict[tuple[int, ...], list[_Table]]] = WeakKeyDictionary()


def _tables_of(shard: GradShard, places: tuple[int, ...]) -> list[_Table]:
    """Returns one table of these gradients for each set of process groups that they are sharded
    over.

    All are sharded over the mesh's shard group; those of tensor-parallel parameters over other
    groups, too.

    Capture: safe after the first call for these places.
    """
    known = _tables.setdefault(shard, {})
    if places not in known:
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for place in places:
            groups = shard.groups(place)
            by_groups.setdefault(groups, []).append(place)
        known[places] = [
            (groups, *_table(shard, together)) for groups, together in by_groups.items()
        ]
    return known[places]


def _table(shard: GradShard, places: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Returns one table, on the device; see `segment_rows`."""
    pieces = [
        (0, shard.layout.pieces[place].shard_offset, 0, shard.views[place].numel(), 0, place)
        for place in places
    ]
    rows, tiles = segment_rows(pieces)
    return rows.to(shard.flat.device), tiles


@lru_cache(maxsize=1024)
def _table_of_one(numel: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Returns the table for a single tensor. Cached so that it is on the device before a
    capture.
    """
    with torch.inference_mode(mode=False):
        rows, tiles = segment_rows([(0, 0, 0, numel, 0, 0)])
        return rows.to(device), tiles


def _over_ranks(sums: _Sums, norm_type: float) -> torch.Tensor:
    """Reduces all to one, by sum or extreme; those with the same groups before they are sent."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for (groups, _), value in sums.items():
        by_groups.setdefault(groups, []).append(value)
    reduced = []
    for groups, values in by_groups.items():
        value = _combined(values, norm_type)
        for group in groups:
            _all_reduce(value, group, norm_type)
        reduced.append(value)
    return _combined(reduced, norm_type)


def _combined(values: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    stacked = torch.stack([value.to(values[0].device) for value in values])
    if not math.isinf(norm_type):
        return stacked.sum(0)
    totals, counts = stacked.unbind(1)
    return torch.stack([totals.amax() if norm_type > 0 else totals.amin(), counts.sum()])


def _all_reduce(value: torch.Tensor, group: dist.ProcessGroup, norm_type: float) -> None:
    # Offloaded gradients, and a backend for devices only.
    if backend_for(group, value.device) is None:
        device = torch.accelerator.current_accelerator()
        there = value.to(device)
        _all_reduce(there, group, norm_type)
        value.copy_(there)
        return
    # An extreme and its count are one message, so a minimum is sent as the maximum of the negated
    # values. The maximum of NaN depends on the backend, so NaN is sent as infinity; the count
    # records it.
    is_extreme, sign = math.isinf(norm_type), math.copysign(1.0, norm_type)
    if is_extreme:
        value[0] *= sign
        value.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    with recorder.group_log(group).waiting(_WHAT):
        op = dist.ReduceOp.MAX if is_extreme else dist.ReduceOp.SUM
        dist.all_reduce(value, op, group=group)
    if is_extreme:
        value[0] *= sign
