"""The order of work on a CUDA device, from torch's trace of its events.

Each stream has a vector clock (Lamport 1978; Mattern 1988). Recording an event copies its stream's
clock into the event, a wait merges the event's clock into the waiting stream's. A wait of the host
merges it into the host's clock, which is merged into the clock of every later launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["EventOrder"]

_Clock = dict[int, int]


def _merge(into: _Clock, other: _Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


class EventOrder:
    """Follows torch's trace of a CUDA device's events, those of NCCL and autograd included.

    Args:
        device: whose current stream is meant.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clocks: dict[int, _Clock] = {}
        self._events: dict[int, _Clock] = {}
        self._host: _Clock = {}

    # -- the
    # order----------------------------------------------------------------------------------------

    def current(self) -> int:
        """Returns the handle of the current stream, as in the trace."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def now(self) -> tuple[int, int]:
        """Advances the clock of the current stream; returns the stream and its time."""
        stream = self.current()
        return stream, self._tick(stream)[stream]

    def is_ordered(self, moment: tuple[int, int]) -> bool:
        """Returns whether work launched on the current stream now runs after `moment`."""
        stream, time = moment
        return self._clock(self.current()).get(stream, 0) >= time

    def _clock(self, stream: int) -> _Clock:
        clock = self._clocks.setdefault(stream, {})
        _merge(clock, self._host)  # what the host has waited for precedes what it launches
        return clock

    def _tick(self, stream: int) -> _Clock:
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    # -- the trace

    def start(self) -> None:
        """Starts following the trace. Torch cannot switch its trace off again."""
        torch._C._activate_gpu_trace()
        for registry, listener in self._listeners():
            registry.callback_list.append(listener)

    def stop(self) -> None:
        """Stops following it."""
        for registry, listener in self._listeners():
            if listener in registry.callback_list:
                registry.callback_list.remove(listener)

    def _listeners(self) -> list[tuple[Any, Callable[..., None]]]:
        from torch.cuda import _gpu_trace as trace

        return [
            (trace.EventCreationCallbacks, self._forget),
            (trace.EventDeletionCallbacks, self._forget),
            (trace.EventRecordCallbacks, self._recorded),
            (trace.EventWaitCallbacks, self._waited),
            (trace.EventSynchronizationCallbacks, self._host_waited_for_event),
            (trace.StreamSynchronizationCallbacks, self._host_waited_for_stream),
            (trace.DeviceSynchronizationCallbacks, self._host_waited),
        ]

    def _forget(self, event: int) -> None:
        self._events.pop(event, None)

    def _recorded(self, event: int, stream: int) -> None:
        self._events[event] = dict(self._tick(stream))

    def _waited(self, event: int, stream: int) -> None:
        _merge(self._clock(stream), self._events.get(event, {}))

    def _host_waited_for_event(self, event: int) -> None:
        _merge(self._host, self._events.get(event, {}))

    def _host_waited_for_stream(self, stream: int) -> None:
        _merge(self._host, self._clock(stream))

    def _host_waited(self, *_: object) -> None:
        for clock in self._clocks.values():
            _merge(self._host, clock)
