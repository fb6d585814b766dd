"""Streams and the order between them; the engine's only file that uses torch's events.

The engine uses four streams: the caller's *compute* stream (the current one), one for all-gathers,
one for reductions, and one for the second steps of reductions (an all-reduce over replicas). A
stream waits for an *event*, a point in another stream's work, and not for later work. The CPU has
no streams: there, every operation does nothing and the engine's code is the same.

[Note: The border of a capture]
A capture cannot wait for an event recorded outside of it, nor can later work wait for an event
recorded inside. At both borders nothing is in flight: before a capture the host waits for the
device, and a replay is work of one stream, which later work waits for. So all events are forgotten
there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from shardgrad.engine.tracing import NOTHING

# A stream is opaque to the engine: torch.Stream, or None where the device has none.
Stream = torch.Stream | None


class StreamEvent:
    """A point in the work of the stream on which it was last recorded.

    On the CPU, where a call returns when its work is done, it has always passed.
    """

    def record(self, stream: Stream, /) -> None:
        """Moves the event to the end of the work queued on `stream` so far."""

    def wait(self, stream: Stream, /) -> None:
        """Makes later work of `stream` wait for the event; no-op if it was never recorded.

        Does not block the host. Free if the event was recorded on `stream`.
        """

    def wait_on_host(self) -> None:
        """Blocks the host until the event; no-op if it was never recorded. Capture: not safe."""


class Streams:
    """The stream operations that the engine needs of a device; here for the CPU, whose only stream
    is None.

    Attributes:
        gather: of all-gathers.
        reduce: of reductions.
        second: of second steps, on a mesh with another axis to reduce over.
    """

    gather: Stream = None
    reduce: Stream = None
    second: Stream = None

    def current(self) -> Stream:
        """Returns the calling thread's current stream."""
        return None

    def event(self) -> StreamEvent:
        """Returns a new event that was not recorded yet."""
        return StreamEvent()

    def event_of(self, event: torch.Event, /) -> StreamEvent:
        """Wraps an event of the program, which the engine never records."""
        return StreamEvent()

    def on(self, stream: Stream, /) -> AbstractContextManager[object]:
        """Returns a context in which `stream` is current."""
        return NOTHING

    def order(self, earlier: Stream, later: Stream) -> None:
        """Makes later work of a stream wait for the work queued on another one so far."""
        if earlier != later:
            event = self.event()
            event.record(earlier)
            event.wait(later)

    def forget_events(self) -> None:
        """Treats every event as never recorded. See [Note: The border of a capture]."""


class _DeviceEvent(StreamEvent):
    """An event that is recorded repeatedly; `_era` is that of its last record."""

    def __init__(self, event: torch.Event, streams: AcceleratorStreams, era: int = -1) -> None:
        self._event = event
        self._streams = streams
        self._stream: Stream = None
        self._era = era

    def record(self, stream: Stream) -> None:
        _require(stream)
        self._event.record(stream)
        self._stream = stream
        self._era = self._streams.era

    def wait(self, stream: Stream) -> None:
        # One stream's work is in order already; a wait would only lengthen a captured graph. A
        # program's event has no known stream. (In torch, `stream != None` is False, so check for
        # None first.)
        is_elsewhere = self._stream is None or self._stream != stream
        if self._era == self._streams.era and is_elsewhere:
            _require(stream)
            self._event.wait(stream)

    def wait_on_host(self) -> None:
        if self._era == self._streams.era:
            self._event.synchronize()


def _require(stream: Stream) -> torch.Stream:
    """Returns `stream`; refuses None, the CPU's stream, with an accelerator's event."""
    if stream is None:
        raise TypeError(
            "expected a torch.Stream of the event's device, got None (the CPU has no streams)"
        )
    return stream


class AcceleratorStreams(Streams):
    """Streams of one accelerator; events recorded in an earlier `era` count as never recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.era = 0
        # High priority, as in FSDP2: a late collective delays all ranks, while compute that yields
        # a few blocks to it delays one.
        self.gather = torch.Stream(device, priority=-1)
        self.reduce = torch.Stream(device, priority=-1)
        self.second = torch.Stream(device, priority=-1)

    def current(self) -> Stream:
        """Returns the calling thread's current stream on this device."""
        return torch.accelerator.current_stream(self._device.index)

    def event(self) -> StreamEvent:
        """Returns an event that wraps one `torch.Event`."""
        return _DeviceEvent(torch.Event(self._device), self)

    def event_of(self, event: torch.Event) -> StreamEvent:
        """Wraps the program's event."""
        return _DeviceEvent(event, self, self.era)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Returns a context that makes `stream` current (a `torch.Stream` is one)."""
        return _require(stream)

    def forget_events(self) -> None:
        """See `Streams.forget_events`."""
        self.era += 1

    def join(self) -> None:
        """Orders all work of the engine's streams and the current one; no-op if one is captured."""
        current, *own = streams = [
            *map(_require, (self.current(), self.gather, self.reduce, self.second))
        ]
        for stream in streams:
            with stream:  # other models may share it
                if is_capturing(self._device):
                    return
        for stream in own:
            current.wait_stream(stream)
        for stream in own:
            stream.wait_stream(current)


def is_capturing(device: torch.device) -> bool:
    """Returns whether the calling thread's current stream is capturing a graph."""
    module = getattr(torch, device.type, None)  # as `torch.get_device_module`, but None for meta
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def streams_for(device: torch.device) -> Streams:
    """Returns the streams of `device`: no-ops for the CPU and meta, real ones for an
    accelerator.
    """
    if device.type in ("cpu", "meta"):
        return Streams()
    return AcceleratorStreams(device)


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Tells the allocator that the current stream reads a tensor of another stream.

    For a tensor that is dropped next.
    """
    if tensor.device.type not in ("cpu", "meta"):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def wait_for_device(device: torch.device) -> None:
    """Blocks the host until the device has done all queued work; returns at once for the CPU."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
