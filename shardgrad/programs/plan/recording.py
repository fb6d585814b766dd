"""Records what the engine launches, in the host's order, and the memory that it allocates and
frees.

A `Recorder` collects four kinds of events while a step runs on fake tensors:

| event | means |
| --- | --- |
| `Kernel` | an operation on a stream: what it computes and how many bytes it reads and writes |
| `Transfer` | a collective on a stream: the axis of the mesh and the number of bytes |
| `Marked` | an event was recorded on a stream |
| `Waited` | a stream waits for an event |

and every allocation and release (`memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from shardgrad.engine.streams import Stream, StreamEvent, Streams
from shardgrad.programs.plan.memory import Memory


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operation of the device.

    Attributes:
        stream: "compute", "gather", "reduce" or "second".
        phase: "forward", "backward" or "optimizer".
        is_of_model: whether it is the model's, in forward or backward.
        flops: multiplications and additions of matrix products and convolutions.
        palm_flops: `flops`, with attention counted as if it were not causal.
        dtype: dtype of the products, such as "bf16".
        nbytes: number of bytes read and written.
    """

    stream: str
    phase: str
    is_of_model: bool
    flops: float
    palm_flops: float
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective.

    Attributes:
        stream: stream that it was launched on.
        kind: "all-gather", "reduce-scatter", "all-reduce" or "exchange".
        axis: axis of the mesh: "shard" or "replicate"; "both" for a group that is over neither.
        ranks: number of ranks.
        nbytes: size of the unsharded message: the result of an all-gather, or the input of a
            reduction.
    """

    stream: str
    kind: str
    axis: str
    ranks: int
    nbytes: int

    @property
    def sent_nbytes(self) -> int:
        """Number of bytes that this rank sends."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * (self.nbytes * (self.ranks - 1) // self.ranks)


@dataclass(frozen=True, slots=True)
class Marked:
    """An event was recorded on a stream; `mark` is its number."""

    mark: int
    stream: str


@dataclass(frozen=True, slots=True)
class Waited:
    """A stream waits for the event number `mark`."""

    mark: int
    stream: str


Event = Kernel | Transfer | Marked | Waited


@dataclass
class Recorder:
    """Collects events and changes of memory.

    Attributes:
        phase: current phase of the step; before the first, what is built.
        stream: name of the current stream.
        axes: name of the mesh axis of a process group, by the group's name.
        events: events in the host's order.
        memory: of the step.
    """

    phase: str = "model"
    stream: str = "compute"
    axes: dict[str, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Makes a stream current inside the context."""
        former, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = former


class _RecordingEvent(StreamEvent):
    """An event of a stream whose recordings and waits are recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._now: int | None = None
        self._stream: Stream = None

    def record(self, stream: Stream) -> None:
        self._now = len(self._recorder.events)  # a number that no other mark has
        self._stream = stream
        self._recorder.events.append(Marked(self._now, str(stream)))

    def wait(self, stream: Stream) -> None:
        # Work of one stream is in order already.
        if self._now is not None and stream != self._stream:
            self._recorder.events.append(Waited(self._now, str(stream)))


class RecordingStreams(Streams):
    """Four streams that run nothing; waits between them are recorded.

    Args:
        recorder: recorder of the step.
    """

    # A stream is opaque to the engine, so a name serves.
    gather: Stream = "gather"  # type: ignore[assignment]
    reduce: Stream = "reduce"  # type: ignore[assignment]
    second: Stream = "second"  # type: ignore[assignment]

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def current(self) -> Stream:
        """Returns the name of the current stream."""
        return self._recorder.stream  # type: ignore[return-value]

    def event(self) -> StreamEvent:
        """Returns an event whose waits are recorded."""
        return _RecordingEvent(self._recorder)

    def event_of(self, event: torch.Event) -> StreamEvent:
        """Returns an event without recordings: a plan has no events of the program."""
        return _RecordingEvent(self._recorder)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Returns a context in which `stream` is current."""
        return self._recorder.on(str(stream))
