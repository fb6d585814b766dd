"""Streams and the order between them; the only file that records events and waits for them.

The engine uses four: the caller's *compute* stream (whatever is current), one for all-gathers, one
for reductions, and one for second steps of these (an all-reduce over replicas). A stream waits for
an *event*, a point in another stream's work, never for all of that work. On the CPU, which has no
streams, every operation here does nothing, so the engine's code is the same.

[Note: The border of a capture]
An event recorded outside of a capture cannot be waited for inside, and the other way round. At both
borders nothing is in flight (before a capture the host has waited for the device, and a replay is
work of one stream, which what comes next waits for), so all events are forgotten there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from shardgrad.engine.tracing import NOTHING

__all__ = [
    "AcceleratorStreams",
    "NoStreams",
    "Stream",
    "StreamEvent",
    "Streams",
    "is_capturing",
    "keep_for_current_stream",
    "streams_for",
    "wait_for_device",
    "wait_for_stream",
]

# A stream is opaque to the engine: torch.Stream, or None where the device has none.
Stream = torch.Stream | None


class StreamEvent(Protocol):
    """A point in the work of the stream it was last recorded on."""

    def record(self, stream: Stream, /) -> None:
        """Moves the event to the end of what `stream` has been given so far."""

    def wait(self, stream: Stream, /) -> None:
        """Makes later work of `stream` start after the event; nothing if it was never recorded.

        The host does not block. Free when `stream` is the stream the event was recorded on.
        """

    def wait_on_host(self) -> None:
        """Blocks the host until the event; nothing if it was never recorded. Capture: not safe."""


class Streams(Protocol):
    """What the engine asks of a device. Replaced by a recorder in tests."""

    gather: Stream  # of all-gathers
    reduce: Stream  # of reductions
    second: Stream  # of what follows a reduce-scatter on a mesh with another dim to reduce over

    def current(self) -> Stream:
        """Returns the stream that the calling thread's work goes to."""

    def event(self) -> StreamEvent:
        """Returns a new event, not recorded yet."""

    def event_of(self, event: torch.Event, /) -> StreamEvent:
        """Returns a program's event; the engine never records it."""

    def on(self, stream: Stream, /) -> AbstractContextManager[object]:
        """Returns a context in which work goes to `stream`."""

    def forget_events(self) -> None:
        """Makes every event one that was never recorded. See [Note: The border of a capture]."""


class _NoEvent:
    """An event on the CPU, where work is done when the call that gives it returns."""

    def record(self, stream: Stream) -> None:
        """Does nothing."""

    def wait(self, stream: Stream) -> None:
        """Does nothing."""

    def wait_on_host(self) -> None:
        """Does nothing."""


_NO_EVENT = _NoEvent()


class NoStreams:
    """The CPU, whose only stream is None."""

    gather: Stream = None
    reduce: Stream = None
    second: Stream = None

    def current(self) -> Stream:
        """Returns None."""
        return None

    def event(self) -> StreamEvent:
        """Returns an event that is always over."""
        return _NO_EVENT

    def event_of(self, event: torch.Event) -> StreamEvent:
        """Returns an event that is always over."""
        return _NO_EVENT

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Returns a context that changes nothing."""
        return NOTHING

    def forget_events(self) -> None:
        """Does nothing."""


class _DeviceEvent:
    """An event that is recorded again and again; `era` is that of its last record."""

    __slots__ = ("_era", "_event", "_stream", "_streams")

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
        # Work of one stream is in order already; a wait there would only lengthen a captured graph.
        # That of a program's event is not known; to torch no stream differs from None.
        is_elsewhere = self._stream is None or self._stream != stream
        if self._era == self._streams.era and is_elsewhere:
            _require(stream)
            self._event.wait(stream)

    def wait_on_host(self) -> None:
        if self._era == self._streams.era:
            self._event.synchronize()


def _require(stream: Stream) -> torch.Stream:
    """Returns `stream`, refusing None: an event of an accelerator was used with the CPU's
    non-stream.
    """
    if stream is None:
        raise TypeError(
            "expected a torch.Stream of the event's device, got None (the CPU has no streams)"
        )
    return stream


class AcceleratorStreams:
    """Streams of one accelerator, its own of high priority; events of an earlier `era` are
    forgotten.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.era = 0
        # Of high priority, as FSDP2's are: a collective that starts late holds up all ranks, while
        # compute that yields a few blocks to it holds up one.
        self.gather: Stream = torch.Stream(device, priority=-1)
        self.reduce: Stream = torch.Stream(device, priority=-1)
        self.second: Stream = torch.Stream(device, priority=-1)

    def current(self) -> Stream:
        """Returns the calling thread's current stream on this device."""
        return torch.accelerator.current_stream(self._device.index)

    def event(self) -> StreamEvent:
        """Returns an event kept by one `torch.Event`."""
        return _DeviceEvent(torch.Event(self._device), self)

    def event_of(self, event: torch.Event) -> StreamEvent:
        """Returns the program's event."""
        return _DeviceEvent(event, self, self.era)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Returns a context that makes `stream` current (a `torch.Stream` is one)."""
        return _require(stream)

    def forget_events(self) -> None:
        """See `Streams.forget_events`."""
        self.era += 1

    def join(self) -> None:
        """Orders all work of the current stream and of these after each other; nothing if one is
        captured.
        """
        current, *own = streams = [
            *map(_require, (self.current(), self.gather, self.reduce, self.second))
        ]
        for stream in streams:
            with stream:  # which another model may have been lent, too
                if is_capturing(self._device):
                    return
        for stream in own:
            current.wait_stream(stream)
        for stream in own:
            stream.wait_stream(current)


def is_capturing(device: torch.device) -> bool:
    """Returns whether the calling thread's current stream is recording a graph instead of
    running.
    """
    module = getattr(torch, device.type, None)  # as `torch.get_device_module`; none for meta
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def streams_for(device: torch.device) -> Streams:
    """Returns the streams of `device`: free ones for the CPU and meta, real ones for an
    accelerator.
    """
    if device.type in ("cpu", "meta"):
        return NoStreams()
    return AcceleratorStreams(device)


def wait_for_stream(stream: torch.Stream, other: torch.Stream) -> None:
    """Makes later work of `stream` start after what `other` has been given so far."""
    if stream != other:
        stream.wait_stream(other)


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Tells the allocator that the current stream reads a tensor of another one, which is dropped
    next.
    """
    if tensor.device.type not in ("cpu", "meta"):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def wait_for_device(device: torch.device) -> None:
    """Blocks the host until the device has done everything it was given; the CPU always has."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
