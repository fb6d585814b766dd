"""Memory while a step runs on fake tensors: allocated bytes by owner.

Allocators hand out memory in the host's order, so the largest sum is the peak.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

_BLOCK_NBYTES = 512  # what the CUDA caching allocator rounds up to
# The owner of storages that do not outlive the step is named after the phase of their allocation.
_PASSING = {
    "forward": "activations",
    "backward": "unsharded gradients and temporaries",
    "optimizer": "temporaries",
}


@dataclass(eq=False)
class _Storage:
    """What is known of a storage: what it has now, the stream of its allocation, and its owner."""

    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int = 0
    stream: str = ""
    owner: str = ""  # if it outlives a step
    passing_owner: str = ""

    def __str__(self) -> str:
        return self.owner or self.passing_owner


class Memory:
    """Memory of rank 0.

    Attributes:
        resting: number of bytes by owner when the step began.
        at_peak: the same when they are most together.
    """

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}  # by address
        self.start_over(())

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

    def start_over(self, owners: Iterable[tuple[str, torch.UntypedStorage]]) -> None:
        """Begins with what there is now.

        Args:
            owners: of the storages that stay.
        """
        for owner, storage in owners:
            if storage._cdata in self._storages:
                self._storages[storage._cdata].owner = owner
        self._now: dict[str, int] = defaultdict(int)
        self._by_stream: dict[str, int] = defaultdict(int)
        for known in self._storages.values():
            known.passing_owner = "other"
            self._now[str(known)] += known.nbytes
            self._by_stream[known.stream] += known.nbytes
        self.resting = self.at_peak = dict(self._now)
        self._peaks = dict(self._by_stream)

    def saw(self, storage: torch.UntypedStorage, *, stream: str, phase: str) -> None:
        """Takes note of a storage, if it is new."""
        address = storage._cdata
        if address not in self._storages:
            reference = weakref.ref(storage, partial(self._died, address))
            self._storages[address] = _Storage(reference)
            self.resized(storage, stream=stream, phase=phase)

    def resized(self, storage: torch.UntypedStorage, *, stream: str, phase: str) -> None:
        """Takes note of what a known storage has now."""
        known = self._storages.get(storage._cdata)
        if known is not None:
            self._add(known, -known.nbytes)
            known.nbytes = -(-storage.nbytes() // _BLOCK_NBYTES) * _BLOCK_NBYTES
            known.stream, known.passing_owner = stream, _PASSING.get(phase, "other")
            self._add(known, known.nbytes)

    def _died(self, address: int, _: object) -> None:
        known = self._storages.pop(address)
        self._add(known, -known.nbytes)

    def _add(self, known: _Storage, nbytes: int) -> None:
        stream = known.stream
        self._now[str(known)] += nbytes
        self._by_stream[stream] += nbytes
        self._peaks[stream] = max(self._peaks.get(stream, 0), self._by_stream[stream])
        if sum(self._now.values()) > self.peak_nbytes:
            self.at_peak = dict(self._now)
