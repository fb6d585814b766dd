"""Comparing the collectives that the ranks of a group have started."""

from __future__ import annotations

import threading

import torch.distributed as dist

from shardgrad.diagnosis.all_gather_object import all_gather_object
from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.diagnosis.rank_status import RankStatus, diagnose, rank_status
from shardgrad.errors import DesyncError

__all__ = ["require_same_collectives"]


def require_same_collectives(group: dist.ProcessGroup) -> None:
    """Compares the flight recorders of the ranks of a group. A collective of that group.

    Sends one message of a few hundred bytes, the fingerprints, and the last collectives only if
    those differ. Collectives in flight count as well, so every rank must call it at the same point
    of the program.

    Args:
        group: a process group whose collectives are the same on all ranks, such as another gloo
            group than the model's.

    Raises:
        DesyncError: on every rank, naming the rank that called another collective first.
    """
    if group.size() == 1:
        return
    own = {
        log.name: (log.ranks, log.count, log.fingerprint)
        for log in recorder.group_logs()
        if not log.is_background
    }
    everywhere: list[dict[str, tuple[tuple[int, ...], int, int]]] = all_gather_object(own, group)
    states: dict[tuple[str, tuple[int, ...]], set[tuple[int, int]]] = {}
    for logs in everywhere:
        for name, (ranks, count, fingerprint) in logs.items():
            states.setdefault((name, ranks), set()).add((count, fingerprint))
    if all(len(different) == 1 for different in states.values()):
        return
    status = rank_status(recorder, dist.get_rank(), thread=threading.get_ident())
    texts: list[str] = all_gather_object(status.to_json(), group)
    statuses = {each.rank: each for each in map(RankStatus.from_json, texts)}
    diagnosis = diagnose(statuses, max(statuses) + 1)
    counts = ", ".join(
        f"rank {rank}: {sum(map(each.last_seq_id, each.collectives))}"
        for rank, each in sorted(statuses.items())
    )
    raise DesyncError(
        diagnosis.sentence
        if diagnosis.culprits
        else f"ranks have made more collectives than others: {counts}",
        expected="the same collectives in the same order on every rank",
        got=f"{sum(len(different) > 1 for different in states.values())} process groups that "
        f"differ",
        where=f"rank {dist.get_rank()}, {status.location}",
        fix="with shardgrad.participate(model): if ranks run different units",
    )
