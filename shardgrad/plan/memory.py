"""Memory over one step: what is allocated after each event, and to whom it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardgrad.plan.rehearsal import Rehearsal

__all__ = ["MemoryCurve", "Moment", "memory_of"]

# What nobody keeps from step to step is named after the phase in which it was allocated.
_PASSING = {
    "forward": "activations",
    "backward": "whole gradients and temporaries",
    "optimizer": "temporaries",
}


@dataclass(frozen=True)
class Moment:
    """Bytes at one point of the step.

    Attributes:
        event: how many events came before.
        nbytes: by owner.
    """

    event: int
    nbytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Of all owners."""
        return sum(self.nbytes.values())


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of rank 0 in a steady step.

    Attributes:
        moments: one for each event that changed something, in order.
        peak: the moment at which most was allocated.
        reserved_nbytes: what a caching allocator keeps: the sum of the peaks of the streams, since memory of
            one stream is not lent to another.
    """

    moments: tuple[Moment, ...]
    peak: Moment
    reserved_nbytes: int


def memory_of(rehearsal: Rehearsal) -> MemoryCurve:
    """Returns the curve of a rehearsed step."""
    now = dict(rehearsal.resting)
    homes = dict(rehearsal.homes)
    peaks = dict(homes)
    moments = [Moment(0, dict(now))]
    peak = moments[0]
    passing: dict[int, str] = {}
    for change in rehearsal.changes:
        owner = rehearsal.owners.get(change.storage)
        if owner is None:
            if change.storage not in passing:
                passing[change.storage] = _PASSING.get(change.phase, "other")
            owner = passing[change.storage]
            if change.nbytes < 0:
                del passing[change.storage]
        now[owner] = now.get(owner, 0) + change.nbytes
        homes[change.stream] = homes.get(change.stream, 0) + change.nbytes
        peaks[change.stream] = max(peaks.get(change.stream, 0), homes[change.stream])
        moment = Moment(change.event, dict(now))
        if moments[-1].event == change.event:
            moments[-1] = moment
        else:
            moments.append(moment)
        if moment.total > peak.total:
            peak = moment
    return MemoryCurve(tuple(moments), peak, sum(peaks.values()))
