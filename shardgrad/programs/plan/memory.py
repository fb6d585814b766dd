"""Memory over one step: allocated bytes after each event, by owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardgrad.programs.plan.rehearsal import Rehearsal

__all__ = ["MemoryCurve", "Moment", "memory_of"]

# The owner of storages that do not outlive the step is named after the phase of their allocation.
_PASSING = {
    "forward": "activations",
    "backward": "unsharded gradients and temporaries",
    "optimizer": "temporaries",
}


@dataclass(frozen=True)
class Moment:
    """Allocated bytes at one point of the step.

    Attributes:
        event: number of events before it.
        nbytes: number of bytes by owner.
    """

    event: int
    nbytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Number of bytes of all owners."""
        return sum(self.nbytes.values())


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of rank 0 in a steady step.

    Attributes:
        moments: one moment for each event that changed the memory, in order.
        peak: moment of the largest total.
        reserved_nbytes: memory that a caching allocator reserves: the sum of the peaks of the
            streams, since it does not reuse memory of one stream on another.
    """

    moments: tuple[Moment, ...]
    peak: Moment
    reserved_nbytes: int


def memory_of(rehearsal: Rehearsal) -> MemoryCurve:
    """Returns the memory over a rehearsed step."""
    now = dict(rehearsal.resting)
    start_nbytes_by_stream = dict(rehearsal.start_nbytes_by_stream)
    peaks = dict(start_nbytes_by_stream)
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
        start_nbytes_by_stream[change.stream] = (
            start_nbytes_by_stream.get(change.stream, 0) + change.nbytes
        )
        peaks[change.stream] = max(
            peaks.get(change.stream, 0), start_nbytes_by_stream[change.stream]
        )
        moment = Moment(change.event, dict(now))
        if moments[-1].event == change.event:
            moments[-1] = moment
        else:
            moments.append(moment)
        if moment.total > peak.total:
            peak = moment
    return MemoryCurve(tuple(moments), peak, sum(peaks.values()))
