"""Compares descriptions of ranks, line by line, with that of the first rank.

The amount that a rank sends does not grow with the number of ranks: the first rank broadcasts its
lines, and a reduction finds the first rank that differs, which then broadcasts its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.errors import RankDisagreementError


def require_same_lines(
    lines: Sequence[str],
    count: int,
    group: dist.ProcessGroup,
    *,
    what: str = "ranks built different models",
    fix: str = "build the model from the same configuration, in the same order, on every rank, "
    "with the same version of shardgrad",
) -> int:
    """Returns the largest `count` of all ranks, if all have the same lines. A collective.

    Streams: the current stream of the group's device; the host waits for it.

    Raises:
        RankDisagreementError: on every rank, naming the first rank that differs from the group's
            first, and their first lines that differ. It says `what`, and a `fix`.
    """
    text = "\n".join(lines)
    ranks = dist.get_process_group_ranks(group)
    expected = _sent_by(0, text, group)
    differs = 0 if text == expected else len(ranks) - group.rank()
    differs, count = largest([differs, count], group)
    if not differs:
        return count
    other = len(ranks) - differs
    got = _sent_by(other, text, group)
    pairs = zip_longest(expected.split("\n"), got.split("\n"), fillvalue="nothing more")
    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    raise RankDisagreementError(
        what,
        expected=f"rank {ranks[0]}: {ours}",
        got=f"rank {ranks[other]}: {theirs}",
        where=f"rank {dist.get_rank()}",
        fix=fix,
    )


def largest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Returns the elementwise maximum over all ranks. A collective; the host waits for it."""
    device = dist.distributed_c10d._get_object_coll_device(group)
    maxima = torch.tensor(numbers, dtype=torch.int64, device=device)
    # Not an all-reduce: one of a rank at another point, such as a DTensor's norm, could match it.
    root = dist.get_global_rank(group, 0)
    _wait_for(partial(dist.reduce, maxima, root, dist.ReduceOp.MAX), group)
    _wait_for(partial(dist.broadcast, maxima, root), group)
    return list(map(int, maxima.tolist()))


def _sent_by(rank: int, text: str, group: dist.ProcessGroup) -> str:
    """Broadcasts a text from a rank of the group, and returns it."""
    own = text.encode() if group.rank() == rank else b""
    [length] = largest([len(own)], group)
    device = dist.distributed_c10d._get_object_coll_device(group)
    octets = torch.tensor(list(own) or [0] * length, dtype=torch.uint8, device=device)
    _wait_for(partial(dist.broadcast, octets, dist.get_global_rank(group, rank)), group)
    return bytes(octets.tolist()).decode()


def _wait_for(collective: Callable[..., dist.Work], group: dist.ProcessGroup) -> None:
    log = recorder.group_log(group)
    entry = log.record("comparison of the ranks")
    log.wait_for(collective(group=group, async_op=True), entry)
