"""What this rank is doing: the step, the part of it, the unit, and which collective of which group of ranks.

[Note: Journal]
When a collective hangs, every rank knows only its own side. So each keeps, for every group of ranks that it
communicates in, the number of collectives so far, the last few of them, and a fingerprint of them all: what
each moved, how many elements, of which dtype. Two ranks of one group have to have the same fingerprint after
the same number. Whoever has counted less is late; whoever has another fingerprint has left the common order.
Keeping it costs about a microsecond a collective and no memory that grows; nothing is sent until somebody
asks (`inquest.py`, `engine/same_model.py`).

A graph's replay runs no Python: under `graphed_step` the journal holds the collectives of the capture once,
and the step goes on counting.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["Entry", "Journal", "Line", "journal"]

_KEPT = 64  # more than two ranks of one group can be apart by prefetching
_MULTIPLIER = 0x5851F42D4C957F2D  # of Knuth's MMIX generator: odd, and mixes all 64 bits
_MASK = 2**64 - 1


class Entry(NamedTuple):
    """One collective.

    Attributes:
        number: its place in the order of its group, from 1.
        what: for example "all-gather of layers.3".
        numel: elements that this rank put in; 0 for Python's objects, each rank's of a size of its own.
        dtype: of them.
        fingerprint: of all collectives of the group up to and including this one.
    """

    number: int
    what: str
    numel: int
    dtype: str
    fingerprint: int


class Line:
    """The collectives of one group of ranks, in the order in which this rank began them.

    Attributes:
        name: of the process group, the same on all its ranks.
        ranks: of the group, as numbered in the whole world.
        count: collectives begun.
        fingerprint: of all of them, in their order.
        recent: the last ones.
        is_aside: whether a thread that does not train begins them, at times of its own.
    """

    def __init__(self, of: Journal, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.count = 0
        self.fingerprint = 0
        self.recent: deque[Entry] = deque(maxlen=_KEPT)
        self.is_aside = False
        self._journal = of
        self._known: dict[tuple[str, int, torch.dtype | str], tuple[str, int]] = {}

    def begin(self, what: str, chunk: torch.Tensor | None) -> Entry:
        """Notes a collective that this rank is about to begin with `chunk`, or with objects if there is none.

        The host's own work only.
        """
        facts = (what, 0, "objects") if chunk is None else (what, chunk.numel(), chunk.dtype)
        known = self._known.get(facts)
        if known is None:  # the same number on every rank and machine, unlike hash()
            key = zlib.crc32(" ".join(map(str, facts)).encode())
            known = self._known[facts] = str(facts[2]), key
        dtype, key = known
        self.count += 1
        self.fingerprint = ((self.fingerprint ^ key) * _MULTIPLIER + self.count) & _MASK
        entry = Entry(self.count, what, facts[1], dtype, self.fingerprint)
        self.recent.append(entry)
        self._journal.moved_s = time.monotonic()
        return entry

    @contextmanager
    def awaited(self, what: str, chunk: torch.Tensor | None = None) -> Iterator[None]:
        """Notes a collective for which the host waits in the block."""
        entry = self.begin(what, chunk)
        self._journal.waits_in = self, entry
        yield
        self._journal.waits_in = None


class Journal:
    """One rank's. See [Note: Journal].

    Attributes:
        step: the one under way, or just taken, from 1; 0 where nobody counts.
        part: of the step, such as "forward" or "checkpoint"; empty where nobody says.
        unit: whose forward or backward ran last; empty before the first.
        moved_s: `time.monotonic()` of the last sign of progress.
        waits_in: the collective for which the host waits, or waited when it failed; without an entry, what
            another thread has begun last in that group.
    """

    def __init__(self) -> None:
        self.step = 0
        self.part = ""
        self.unit = ""
        self.moved_s = time.monotonic()
        self.waits_in: tuple[Line, Entry | None] | None = None
        self._lines: weakref.WeakKeyDictionary[dist.ProcessGroup, Line] = weakref.WeakKeyDictionary()

    def enter(self, part: str, *, step: int | None = None) -> None:
        """Says which part of which step begins; the step stays if it is not given."""
        self.part = part
        if step is not None:
            self.step = step
        self.moved_s = time.monotonic()

    def line(self, group: dist.ProcessGroup) -> Line:
        """Returns the line of a group, the same object for as long as there is the group."""
        line = self._lines.get(group)
        if line is None:
            import torch.distributed as dist

            ranks = tuple(dist.get_process_group_ranks(group))
            line = self._lines[group] = Line(self, group.group_name, ranks)
        return line

    def awaited(self) -> tuple[str | None, Entry | None]:
        """Returns in which group this rank waits, and for which collective; None twice if it does not."""
        if self.waits_in is None:
            return None, None
        line, entry = self.waits_in
        entry = entry or (line.recent[-1] if line.recent else None)
        return (None, None) if entry is None else (line.name, entry)

    def lines(self) -> list[Line]:
        """Returns all lines, of the groups there are now."""
        return list(self._lines.values())


journal = Journal()
