"""What the engine launched, in the order in which the host launched it, and what memory that took.

A `Recorder` collects four things while a step runs on tensors without memory:

| event      | means                                                                                  |
|------------|----------------------------------------------------------------------------------------|
| `Kernel`   | an operation on a stream: what it computes and how many bytes it touches               |
| `Transfer` | a collective on a stream: which axis of the mesh, how many bytes                       |
| `Marked`   | a mark was moved to the end of a stream                                                |
| `Waited`   | a stream waits for a mark, or the host for a transfer                                  |

and, beside them, every allocation and every release, with its place among the events. Allocators hand memory
out in the host's order too, so the largest sum is the peak.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from shardgrad.engine.streams import Stream, StreamEvent

__all__ = ["Change", "Event", "Kernel", "Marked", "PaperStreams", "Recorder", "Transfer", "Waited"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operation of the device.

    Attributes:
        stream: "compute", "gather", "reduce".
        name: of the operator.
        phase: "forward", "backward" or "optimizer".
        is_engine: the engine's own work, not the model's.
        flops: multiplications and additions, of matrix products and convolutions only.
        palm_flops: the same, with attention counted as if it were not causal.
        dtype: of the products, such as "bf16".
        nbytes: read and written.
    """

    stream: str
    name: str
    phase: str
    is_engine: bool
    flops: float
    palm_flops: float
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective.

    Attributes:
        stream: that it was launched on.
        name: what it moves, such as "all-gather of layers.0".
        kind: "all-gather", "reduce-scatter", "all-reduce" or "exchange".
        axis: of the mesh: "shard", "replicate", "both" or "neighbours".
        ranks: that take part.
        nbytes: of the whole message: what all ranks have together after a gather, or before a reduction.
        sent_nbytes: that this rank sends.
        is_awaited: the host waits for it at once.
    """

    stream: str
    name: str
    kind: str
    axis: str
    ranks: int
    nbytes: int
    sent_nbytes: int
    is_awaited: bool


@dataclass(frozen=True, slots=True)
class Marked:
    """A mark was recorded; `mark` numbers them."""

    mark: int
    stream: str


@dataclass(frozen=True, slots=True)
class Waited:
    """`stream` waits for a mark; or, where it is None, the host for the transfer that is event `mark`."""

    mark: int
    stream: str | None


Event = Kernel | Transfer | Marked | Waited


@dataclass(frozen=True, slots=True)
class Change:
    """Memory came or went.

    Attributes:
        event: how many events had been recorded.
        storage: names the memory; an address may be used again, so it is unique only while it lives.
        nbytes: allocated, or negative: released.
        stream: it was allocated on.
        phase: of the step.
    """

    event: int
    storage: int
    nbytes: int
    stream: str
    phase: str


@dataclass
class Recorder:
    """Collects events and changes.

    Attributes:
        granularity: bytes that the allocator rounds up to.
        phase: what the step is doing.
        stream: the current one's name.
        axes: name of the mesh axis of a process group, by the group's name.
        events, changes: see the module.
        live: bytes of every storage there is, as allocated.
    """

    granularity: int = 1
    phase: str = "construction"
    stream: str = "compute"
    axes: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    label: str = ""
    _references: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    _homes: dict[int, str] = field(default_factory=dict)
    _marks: int = 0

    # -- events -----------------------------------------------------------------------------------------

    def new_mark(self) -> int:
        """Returns the number of a mark that is about to be recorded."""
        self._marks += 1
        return self._marks

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Makes a stream current."""
        former, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = former

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Names the transfers inside."""
        former, self.label = self.label, label
        try:
            yield
        finally:
            self.label = former

    def start_over(self) -> None:
        """Forgets the events and changes so far; what is alive stays."""
        self.events.clear()
        self.changes.clear()

    # -- memory -----------------------------------------------------------------------------------------

    def nbytes_by_home(self) -> dict[str, int]:
        """Returns the bytes that are allocated now, by the stream they were allocated on."""
        sums: dict[str, int] = {}
        for key, nbytes in self.live.items():
            sums[self._homes[key]] = sums.get(self._homes[key], 0) + nbytes
        return sums

    def saw(self, tensor: torch.Tensor) -> None:
        """Takes note of a tensor's memory, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._references:
            self._references[key] = weakref.ref(storage, partial(self._died, key))
            self._homes[key] = self.stream
            self._set(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Takes note that a storage has another size."""
        key = storage._cdata
        if key in self._references:
            if storage.nbytes():
                self._homes[key] = self.stream
            self._set(key, storage.nbytes())

    def _died(self, key: int, reference: object) -> None:
        self._set(key, 0)
        del self._references[key], self._homes[key]

    def _set(self, key: int, nbytes: int) -> None:
        rounded = -(-nbytes // self.granularity) * self.granularity
        before = self.live.pop(key, 0)
        if rounded:
            self.live[key] = rounded
        if rounded != before:
            change = Change(len(self.events), key, rounded - before, self._homes[key], self.phase)
            self.changes.append(change)


class _PaperMark:
    """A mark whose recordings and waits are written down."""

    __slots__ = ("_now", "_recorder", "_stream")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._now: int | None = None
        self._stream: Stream = None

    def record(self, stream: Stream) -> None:
        self._now = self._recorder.new_mark()
        self._stream = stream
        self._recorder.events.append(Marked(self._now, str(stream)))

    def wait(self, stream: Stream) -> None:
        if self._now is not None and stream != self._stream:  # work of one stream is in order already
            self._recorder.events.append(Waited(self._now, str(stream)))

    def wait_on_host(self) -> None:
        """Does nothing: the host is not a stream here."""


class PaperStreams:
    """Three streams that run nothing and write down who waits for whom; see
    `shardgrad.engine.streams.Streams`.

    Args:
        recorder: where.
    """

    # A stream is opaque to the engine, so a name serves.
    gather: Stream = "gather"  # type: ignore[assignment]
    reduce: Stream = "reduce"  # type: ignore[assignment]

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def current(self) -> Stream:
        """Returns the name of the current stream."""
        return self._recorder.stream  # type: ignore[return-value]

    def event(self) -> StreamEvent:
        """Returns a mark that is written down."""
        return _PaperMark(self._recorder)

    def event_of(self, event: torch.Event) -> StreamEvent:
        """Returns a mark that says nothing: a plan has no events of programs."""
        return _PaperMark(self._recorder)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Returns a context in which `stream` is current."""
        return self._recorder.on(str(stream))

    def forget_events(self) -> None:
        """Does nothing: nothing is captured on paper."""
