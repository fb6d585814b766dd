"""Streams without a device, which run nothing in parallel but check the order of memory accesses.

`RecordedStreams` replaces a device's streams on a CPU. Work runs at once, so results do not depend on the
order. But every stream has a vector clock (Lamport 1978; Mattern 1988), events carry clocks from one stream
to another, and each access to memory is compared with the earlier ones: two accesses to the same bytes, at
least one of them a write, must be ordered by events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardgrad.engine.streams import StreamEvent

__all__ = ["Hazard", "RecordedStreams"]

_Clock = dict[str, int]


@dataclass(frozen=True)
class _Access:
    what: str
    stream: str
    time: int
    begin: int
    end: int
    writes: bool


@dataclass(frozen=True)
class Hazard:
    """Two unordered accesses to the same bytes.

    Attributes:
        kind: "read after write", "write after read" or "write after write".
        first: name and stream of the first access.
        second: name and stream of the second access.
    """

    kind: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.second} is not ordered after {self.first}"


class _RecordedEvent:
    def __init__(self, streams: RecordedStreams) -> None:
        self._streams = streams
        self._clock: _Clock | None = None
        self._era = -1

    def record(self, stream: Any) -> None:
        self._clock = dict(self._streams.tick(stream))
        self._era = self._streams.era

    def wait(self, stream: Any) -> None:
        if self._clock is None or self._era != self._streams.era:
            return
        clock = self._streams.tick(stream)
        for name, time in self._clock.items():
            clock[name] = max(clock.get(name, 0), time)

    def wait_on_host(self) -> None:
        if self._clock is not None and self._era == self._streams.era:
            self._streams.host_saw(self._clock)


class RecordedStreams:
    """A stand-in for a device's streams; pass it to `CommContext`, or patch
    `shardgrad.engine.comm_context.streams_for`.

    Attributes:
        hazards: what was found, in order.
        gather, reduce: names of the engine's side streams.
        era: marks of an earlier one count as never recorded.
    """

    gather: Any = "gather"
    reduce: Any = "reduce"

    def __init__(self) -> None:
        self.hazards: list[Hazard] = []
        self.era = 0
        self._current: list[str] = ["compute"]
        self._clocks: dict[str, _Clock] = {}
        self._host: _Clock = {}
        self._accesses: list[_Access] = []

    def current(self) -> Any:
        """Returns the name of the current stream; "compute" at first."""
        return self._current[-1]

    def event(self) -> StreamEvent:
        """Returns a mark that carries a vector clock."""
        return _RecordedEvent(self)

    def event_of(self, event: Any) -> StreamEvent:
        """Returns a mark of these streams that stands in for an event."""
        mark: StreamEvent = event
        return mark

    @contextmanager
    def _switch(self, stream: str) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Returns a context in which `stream` is current."""
        return self._switch(stream)

    def forget_events(self) -> None:
        """See `shardgrad.engine.streams.Streams.forget_events`."""
        self.era += 1

    def tick(self, stream: str) -> _Clock:
        """Advances a stream's time and returns its clock."""
        clock = self._clocks.setdefault(stream, {})
        for name, time in self._host.items():  # what the host has seen finish is before all it launches
            clock[name] = max(clock.get(name, 0), time)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def host_saw(self, clock: _Clock) -> None:
        """Records that the host has waited for the work up to a clock."""
        for name, time in clock.items():
            self._host[name] = max(self._host.get(name, 0), time)

    def happens_before(self, first_stream: str, first_time: int, second_stream: str) -> bool:
        """Returns whether present work of `second_stream` is ordered after a time of `first_stream`."""
        return self._clocks.get(second_stream, {}).get(first_stream, 0) >= first_time

    def access(self, what: str, tensor: torch.Tensor, *, writes: bool) -> None:
        """Records an access of the current stream to a tensor's bytes, and compares it with earlier ones."""
        if not tensor.numel():
            return
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        stream = self.current()
        time = self.tick(stream)[stream]
        now = _Access(f"{what} on {stream}", stream, time, begin, end, writes)
        for earlier in self._accesses:
            overlaps = earlier.begin < end and begin < earlier.end
            if not overlaps or not (earlier.writes or writes):
                continue
            if not self.happens_before(earlier.stream, earlier.time, stream):
                kind = {
                    (True, False): "read after write",
                    (False, True): "write after read",
                    (True, True): "write after write",
                }[(earlier.writes, writes)]
                self.hazards.append(Hazard(kind, earlier.what, now.what))
        self._accesses.append(now)
