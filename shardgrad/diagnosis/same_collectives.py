"""Ranks compare which collectives they have made."""

from __future__ import annotations

import threading

import torch.distributed as dist

from shardgrad.diagnosis.all_gather_object import all_gather_object
from shardgrad.diagnosis.flight_recorder import journal
from shardgrad.diagnosis.rank_status import Account, conclude, give_account
from shardgrad.errors import DesyncError

__all__ = ["require_same_collectives"]


def require_same_collectives(group: dist.ProcessGroup) -> None:
    """Compares what the ranks of `group` have communicated so far; a collective of that group.

    Costs one message of a few hundred bytes: the fingerprints, and only if they differ the last collectives.
    What is in flight counts, so every rank must call it at the same place.

    Args:
        group: one whose own collectives are not in doubt, such as another gloo group than the model's.

    Raises:
        DesyncError: on every rank, naming who left the common order first, and where.
    """
    if group.size() == 1:
        return
    own = {
        line.name: (line.ranks, line.count, line.fingerprint) for line in journal.lines() if not line.is_aside
    }
    everyone: list[dict[str, tuple[tuple[int, ...], int, int]]] = all_gather_object(own, group)
    lines: dict[tuple[str, tuple[int, ...]], set[tuple[int, int]]] = {}
    for answer in everyone:
        for name, (ranks, *state) in answer.items():
            lines.setdefault((name, ranks), set()).add((state[0], state[1]))
    if all(len(states) == 1 for states in lines.values()):
        return
    account = give_account(journal, dist.get_rank(), thread=threading.get_ident(), error=None)
    texts: list[str] = all_gather_object(account.to_json(), group)
    heard = {t.rank: t for t in map(Account.from_json, texts)}
    finding = conclude(heard, max(heard) + 1)
    counts = ", ".join(f"rank {rank}: {sum(map(t.begun, t.lines))}" for rank, t in sorted(heard.items()))
    raise DesyncError(
        finding.sentence if finding.culprits else f"ranks have made more collectives than others: {counts}",
        expected="the same collectives in the same order on every rank",
        got=f"{sum(len(states) > 1 for states in lines.values())} groups of ranks that differ",
        where=f"rank {dist.get_rank()}, {account.place}",
        fix="with shardgrad.participate(model): if ranks run different units",
    )
