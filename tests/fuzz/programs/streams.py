"""The streams of a program on one rank: none on the CPU, those of a simulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

SIDE_STREAMS = 4


class NoStreams:
    """Calls what it is given."""

    def all(
        self, places: Sequence[int], calls: Sequence[Callable[[], Any]], *used: Tensor
    ) -> list[Any]:
        """Calls each."""
        return [call() for call in calls]

    def call(self, place: int, call: Callable[..., Any], *used: Tensor) -> Any:
        """Calls one."""
        return self.all([place], [lambda: call(*used)], *used)[0]


class Streams(NoStreams):
    """The streams of a device, used as a careful program uses them.

    Attributes:
        known: all of them; the first is current while they are made.
        shift: how far around all places but the caller's have moved.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.known = (torch.accelerator.current_stream(), *_side_streams(device))
        self.shift = 0

    def at(self, place: int) -> torch.Stream:
        """Returns a stream; place 0 is the current one, in a graph the graph's."""
        place = (place + self.shift) % (SIDE_STREAMS + 1) if place else 0
        if place == 0:
            return torch.accelerator.current_stream()
        return _side_streams(self._device)[place - 1]

    def all(
        self, places: Sequence[int], calls: Sequence[Callable[[], Any]], *used: Tensor
    ) -> list[Any]:
        """Calls each in its stream, after the current one; afterwards the current one comes after
        them.

        The calls do not wait for each other. The allocator is told of what crosses streams.
        """
        here, streams = torch.accelerator.current_stream(), [self.at(place) for place in places]
        others = set(streams) - {here}
        begin = torch.Event(here.device)
        begin.record(here)
        for other in others:
            begin.wait(other)
        results = []
        try:
            for stream, call in zip(streams, calls, strict=True):
                with stream:
                    results.append(call())
        finally:
            for other in others:
                here.wait_stream(other)
                for tensor in used:
                    tensor.record_stream(other)
        for tensor in tree_leaves(results) if others else ():
            if isinstance(tensor, Tensor) and tensor.device == here.device:
                tensor.record_stream(here)
        return results


@cache
def _side_streams(device: torch.device) -> tuple[torch.Stream, ...]:
    # Kept for the process, since a device's pool is small and the engine's streams come from it
    # too.
    return tuple(torch.Stream(device) for _ in range(SIDE_STREAMS))
