"""HFSDP, derived from what the engine does for HSDP.

HSDP keeps the same shard on every replica and all-reduces its gradient. HFSDP cuts that shard once more, over
the replicas: the gradient is reduce-scattered over them, each updates its part, and the parts are gathered
again, once, before the first use in the next step. Everything inside a replica stays as it is, so a rehearsed
HSDP step becomes an HFSDP step by three changes, which are all that is in this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shardgrad.plan.recording import Change, Event, Kernel, Transfer, Waited
from shardgrad.plan.rehearsal import Rehearsal

__all__ = ["over_both_axes"]

_CUT = ("parameters", "gradients", "optimizer state")


def over_both_axes(hsdp: Rehearsal) -> Rehearsal:
    """Returns the rehearsal in which replicas share parameters, gradients and optimizer states."""
    replicas = hsdp.request.replicas
    events: list[Event] = []
    moved: list[int] = []  # where each old event has gone
    inner_nbytes = 0
    gathered: set[str] = set()
    for event in hsdp.events:
        if isinstance(event, Transfer) and event.kind == "all-gather" and event.name not in gathered:
            gathered.add(event.name)
            shard = event.nbytes // event.ranks
            inner_nbytes += shard
            events.append(_over_replicas(event, shard, replicas))
        moved.append(len(events))
        events.append(_cut(event, replicas))
    fixed = [_moved(event, moved) for event in events]
    moved.append(len(events))
    resting = dict(hsdp.resting)
    for owner in _CUT:
        resting[owner] = resting.get(owner, 0) // replicas
    resting["inner shards"] = inner_nbytes
    grown = sum(resting.values()) - sum(hsdp.resting.values())
    homes = dict(hsdp.homes)
    homes["compute"] = homes.get("compute", 0) + grown
    return dataclasses.replace(
        hsdp,
        events=tuple(fixed),
        changes=tuple(_shifted(hsdp.changes, moved)),
        resting=resting,
        start_nbytes=hsdp.start_nbytes + grown,
        homes=homes,
    )


def _over_replicas(gather: Transfer, nbytes: int, replicas: int) -> Transfer:
    """The gather that brings a shard's parts together before it is gathered itself."""
    return dataclasses.replace(
        gather,
        name=f"{gather.name} over replicas",
        axis="replicate",
        ranks=replicas,
        nbytes=nbytes,
        sent_nbytes=nbytes * (replicas - 1) // replicas,
    )


def _cut(event: Event, replicas: int) -> Event:
    """An all-reduce over replicas ends half-way, and the optimizer has as much less to do as there are."""
    if isinstance(event, Transfer) and event.axis == "replicate" and event.kind == "all-reduce":
        return dataclasses.replace(event, kind="reduce-scatter", sent_nbytes=event.sent_nbytes // 2)
    if isinstance(event, Kernel) and event.phase == "optimizer":
        return dataclasses.replace(event, nbytes=event.nbytes // replicas)
    return event


def _moved(event: Event, moved: list[int]) -> Event:
    """A host's wait names the event it waits for."""
    if isinstance(event, Waited) and event.stream is None:
        return dataclasses.replace(event, mark=moved[event.mark])
    return event


def _shifted(changes: tuple[Change, ...], moved: list[int]) -> Iterator[Change]:
    for change in changes:
        yield dataclasses.replace(change, event=moved[change.event])
