"""Memory over one step: allocated bytes after each change, by owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shardgrad.programs.plan.rehearsal import Rehearsal

# The owner of storages that do not outlive the step is named after the phase of their allocation.
_PASSING = {
    "forward": "activations",
    "backward": "unsharded gradients and temporaries",
    "optimizer": "temporaries",
}


@dataclass(frozen=True)
class Memory:
    """Memory of rank 0 in a steady step.

    Attributes:
        at_peak: number of bytes by owner, when they are most together.
        reserved_nbytes: memory that a caching allocator reserves: the sum of the peaks of the
            streams, since it does not reuse memory of one stream on another.
    """

    at_peak: Mapping[str, int]
    reserved_nbytes: int

    @property
    def peak_nbytes(self) -> int:
        """Number of bytes at the peak."""
        return sum(self.at_peak.values())


def memory_of(rehearsal: Rehearsal) -> Memory:
    """Returns the memory over a rehearsed step."""
    now = defaultdict(int, rehearsal.resting)
    by_stream = defaultdict(int, rehearsal.start_nbytes_by_stream)
    peaks, at_peak = dict(by_stream), dict(now)
    total = peak = sum(now.values())
    passing: dict[int, str] = {}
    for change in rehearsal.changes:
        owner = rehearsal.owners.get(change.storage) or passing.setdefault(
            change.storage, _PASSING.get(change.phase, "other")
        )
        if change.nbytes < 0:
            passing.pop(change.storage, None)
        now[owner] += change.nbytes
        by_stream[change.stream] += change.nbytes
        peaks[change.stream] = max(peaks.get(change.stream, 0), by_stream[change.stream])
        total += change.nbytes
        if total > peak:
            peak, at_peak = total, dict(now)
    return Memory(at_peak, sum(peaks.values()))
