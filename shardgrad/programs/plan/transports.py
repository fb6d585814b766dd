"""The engine's transports in a fake process group, where nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardgrad.engine.transports import (
    ExchangeTransport,
    LocalTransport,
    PairTransport,
    StreamTransport,
    Transport,
    Work,
)
from shardgrad.programs.plan.recording import Recorder


class _LaterWork:
    """An exchange that the host waits for later than where it starts it, as is recorded."""

    def __init__(self, chunks: Sequence[torch.Tensor], recorder: Recorder) -> None:
        self._chunks = chunks
        self._events = recorder.events
        self._wait = recorder.events.pop()

    def wait(self) -> Sequence[torch.Tensor]:
        self._events.append(self._wait)
        return self._chunks


class _RecordingExchange(ExchangeTransport):
    """The CPU's transport. Tags cannot be read where nothing arrives."""

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder) -> None:
        super().__init__(group)
        self._recorder = recorder

    def _start(
        self,
        call: Callable[[], dist.Work],
        sent: torch.Tensor,
        chunks: Sequence[torch.Tensor],
        *rest: Any,
    ) -> Work:
        super()._start(call, sent, chunks, *rest)
        return _LaterWork(chunks, self._recorder)

    def all_reduce(self, chunk: torch.Tensor, *, what: str) -> Work:
        super().all_reduce(chunk, what=what)
        return _LaterWork([chunk], self._recorder)


class _RecordingPair(_RecordingExchange, PairTransport):
    """The same between two ranks."""


def recording_transport(
    group: dist.ProcessGroup, recorder: Recorder, *, on_host: bool
) -> Transport:
    """Returns the transport of a group on a CPU (`on_host`) or on an accelerator."""
    # The choice of `transport_for`, which depends on the group's backend: the fake one says nothing
    # about it.
    if group.size() == 1:
        return LocalTransport(group)
    if on_host:
        kind = _RecordingPair if group.size() == 2 else _RecordingExchange
        return kind(group, recorder)
    return StreamTransport(group)
