"""Events and waits around a graph, never inside one; those of a step are in `engine/streams.py`."""

from __future__ import annotations

import torch

__all__ = ["EagerEvent", "wait_for_device", "wait_for_stream"]


class EagerEvent:
    """One `torch.Event` for work that is never part of a capture, such as copies of a step's inputs.

    No capture lies between its `record` and its `wait`, so it is never forgotten.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device)
        self._is_recorded = False

    def record(self, stream: torch.Stream) -> None:
        """Moves the event to the end of what `stream` has been given so far."""
        self._event.record(stream)
        self._is_recorded = True

    def wait(self, stream: torch.Stream) -> None:
        """Makes later work of `stream` start after the event; nothing if it was never recorded."""
        if self._is_recorded:
            self._event.wait(stream)

    def wait_on_host(self) -> None:
        """Blocks the host until the device has reached the event; nothing if it was never recorded."""
        if self._is_recorded:
            self._event.synchronize()

    def is_done(self) -> bool:
        """Returns whether the device has reached the event, without waiting."""
        return not self._is_recorded or bool(self._event.query())


def wait_for_stream(stream: torch.Stream, other: torch.Stream) -> None:
    """Makes later work of `stream` start after what `other` has been given so far."""
    if stream != other:
        stream.wait_stream(other)


def wait_for_device(device: torch.device) -> None:
    """Blocks the host until the device has done everything it was given."""
    torch.accelerator.synchronize(device)
