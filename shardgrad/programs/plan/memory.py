"""Memory over one step: allocated bytes after each change, by owner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

# The owner of storages that do not outlive the step is named after the phase of their allocation.
_PASSING = {
    "forward": "activations",
    "backward": "unsharded gradients and temporaries",
    "optimizer": "temporaries",
}


class Memory:
    """Memory of rank 0, from one moment on. Allocators hand out memory in the host's order, so the
    largest sum is the peak.

    Args:
        owners: of the storages that stay, by number.
        live: number, bytes and stream of each storage that exists at this moment.

    Attributes:
        resting: number of bytes by owner, at this moment.
        at_peak: the same when they are most together.
    """

    def __init__(self, owners: Mapping[int, str], live: Iterable[tuple[int, int, str]]) -> None:
        self._owners, self._passing = owners, dict[int, str]()
        self._now: dict[str, int] = defaultdict(int)
        self._by_stream: dict[str, int] = defaultdict(int)
        for storage, nbytes, stream in live:
            self._now[owners.get(storage, "other")] += nbytes
            self._by_stream[stream] += nbytes
        self.resting = self.at_peak = dict(self._now)
        self._peaks = dict(self._by_stream)

    @property
    def peak_nbytes(self) -> int:
        """Number of bytes at the peak."""
        return sum(self.at_peak.values())

    @property
    def reserved_nbytes(self) -> int:
        """Memory that a caching allocator reserves: the sum of the peaks of the streams, since it
        does not reuse memory of one stream on another.
        """
        return sum(self._peaks.values())

    def change(self, storage: int, nbytes: int, *, stream: str, phase: str) -> None:
        """Takes note of an allocation, or of a release if the number of bytes is negative."""
        owner = self._owners.get(storage) or self._passing.setdefault(
            storage, _PASSING.get(phase, "other")
        )
        if nbytes < 0:
            self._passing.pop(storage, None)
        self._now[owner] += nbytes
        self._by_stream[stream] += nbytes
        self._peaks[stream] = max(self._peaks.get(stream, 0), self._by_stream[stream])
        if sum(self._now.values()) > self.peak_nbytes:
            self.at_peak = dict(self._now)
