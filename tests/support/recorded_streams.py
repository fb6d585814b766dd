"""Streams that run nothing in parallel and record what is ordered after what, for tests.

`RecordedStreams` replaces a device's streams on a CPU. Work still runs at once, so results are
right whatever the order would be on a device; but every stream has a vector clock (Lamport 1978;
Mattern 1988), events carry clocks from one stream to another, and each access to memory is checked
against the earlier ones: two accesses to the same bytes, one of them a write, must be ordered by
events.
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
    """Two accesses to the same bytes that no event orders.

    Attributes:
        kind: "read after write", "write after read" or "write after write".
        first: the earlier access and its stream.
        second: the later one.
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
        gather, reduce, second: names of the engine's side streams.
        era: events of an earlier one count as never recorded.
    """

    gather: Any = "gather"
    reduce: Any = "reduce"
    second: Any = "second"

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
        """Returns an event that carries a vector clock."""
        return _RecordedEvent(self)

    def event_of(self, event: Any) -> StreamEvent:
        """Returns an event of these streams as the program's."""
        recorded: StreamEvent = event
        return recorded

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
        for (
            name,
            time,
        ) in self._host.items():  # what the host has waited for precedes what it launches
            clock[name] = max(clock.get(name, 0), time)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def host_saw(self, clock: _Clock) -> None:
        """Merges the clock of work that the host has waited for into the host's clock."""
        for name, time in clock.items():
            self._host[name] = max(self._host.get(name, 0), time)

    def happens_before(self, first_stream: str, first_time: int, second_stream: str) -> bool:
        """Returns whether work of `second_stream` now is ordered after that moment of
        `first_stream`.
        """
        return self._clocks.get(second_stream, {}).get(first_stream, 0) >= first_time

    def access(self, what: str, tensor: torch.Tensor, *, writes: bool) -> None:
        """Records an access of the current stream to a tensor, and checks it against earlier
        ones.
        """
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
