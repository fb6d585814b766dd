"""The engine's transports in a fake process group: collectives are recorded and transfer no
data.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Chunks
from shardgrad.engine.transports import (
    ExchangeTransport,
    LocalTransport,
    MessageTag,
    PairTransport,
    StreamTransport,
    Transport,
    Work,
)
from shardgrad.programs.plan.recording import Recorder, Transfer, Waited

__all__ = ["recording_transport"]


class _FakeWork:
    """The work of a fake collective, whose results are fake tensors.

    Args:
        chunks: results, which the engine copies out or sums up.
        recorder: recorder of the host's wait.
        awaited: number of the event that the host waits for; None if streams wait.
    """

    def __init__(self, chunks: list[torch.Tensor], recorder: Recorder, awaited: int | None) -> None:
        self._chunks = chunks
        self._recorder = recorder
        self._awaited = awaited

    def wait(self) -> list[torch.Tensor]:
        if self._awaited is not None:
            self._recorder.events.append(Waited(self._awaited, None))
        return self._chunks


class _RecordingStreamTransport(StreamTransport):
    """The accelerator's transport."""

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder) -> None:
        super().__init__(group)
        self._recorder = recorder

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        with self._recorder.labelled(tag.what):
            return super().all_gather(chunk, staging, tag)

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        with self._recorder.labelled(tag.what):
            return super().reduce_scatter(send, receive, tag)

    def all_reduce(self, chunk: torch.Tensor, *, what: str) -> Work:
        with self._recorder.labelled(what):
            return super().all_reduce(chunk, what=what)


class _RecordingExchange(ExchangeTransport):
    """The CPU's transport. Tags cannot be read where nothing arrives."""

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder) -> None:
        super().__init__(group)
        self._recorder = recorder

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        with self._recorder.labelled(tag.what):
            super().all_gather(chunk, staging, tag)
        return self._fake_work([staging.whole])

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        with self._recorder.labelled(tag.what):
            super().reduce_scatter(send, receive, tag)
        is_pair = self.receive_chunks < self.size
        return self._fake_work(
            [send.part(self.rank), receive.whole] if is_pair else [receive.whole]
        )

    def all_reduce(self, chunk: torch.Tensor, *, what: str) -> Work:
        with self._recorder.labelled(what):
            super().all_reduce(chunk, what=what)
        return self._fake_work([chunk])

    def _fake_work(self, chunks: list[torch.Tensor]) -> Work:
        last = len(self._recorder.events) - 1
        is_under_way = isinstance(self._recorder.events[last], Transfer)
        return _FakeWork(chunks, self._recorder, last if is_under_way else None)


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
    return _RecordingStreamTransport(group, recorder)
