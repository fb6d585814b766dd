"""The engine's transports among ranks that do not exist: the real ones, whose flights bring nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Chunks
from shardgrad.engine.message_tag import MessageTag
from shardgrad.engine.transports import ExchangeTransport, StreamTransport, Transport, Work
from shardgrad.plan.recording import Recorder, Transfer, Waited

__all__ = ["paper_transport"]


class _Landed:
    """A flight whose chunks stand for what would have arrived.

    Args:
        chunks: what the engine copies out or sums.
        recorder: the host's wait is written there, where it is one.
        awaited: number of the event that the host waits for; None if streams do.
    """

    def __init__(self, chunks: list[torch.Tensor], recorder: Recorder, awaited: int | None) -> None:
        self._chunks = chunks
        self._recorder = recorder
        self._awaited = awaited

    def wait(self) -> list[torch.Tensor]:
        if self._awaited is not None:
            self._recorder.events.append(Waited(self._awaited, None))
        return self._chunks


class _PaperStreamTransport(StreamTransport):
    """The accelerator's transport."""

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder) -> None:
        super().__init__(group)
        self._recorder = recorder

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, label: MessageTag) -> Work:
        with self._recorder.labelled(label.what):
            super().all_gather(chunk, staging, label)
        # All chunks as one: of 16,384 tensors without content, one says as much.
        return _Landed([staging.whole], self._recorder, None)

    def reduce_scatter(self, send: Chunks, receive: Chunks, label: MessageTag) -> Work:
        with self._recorder.labelled(label.what):
            return super().reduce_scatter(send, receive, label)

    def all_reduce(self, chunk: torch.Tensor, *, what: str) -> Work:
        with self._recorder.labelled(what):
            return super().all_reduce(chunk, what=what)


class _PaperExchangeTransport(ExchangeTransport):
    """The CPU's transport. Labels cannot be read where nothing arrives."""

    def __init__(self, group: dist.ProcessGroup, recorder: Recorder) -> None:
        super().__init__(group)
        self._recorder = recorder

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, label: MessageTag) -> Work:
        with self._recorder.labelled(label.what):
            super().all_gather(chunk, staging, label)
        return self._landed([chunk] if self.size == 1 else self._arrivals(chunk, staging))

    def reduce_scatter(self, send: Chunks, receive: Chunks, label: MessageTag) -> Work:
        with self._recorder.labelled(label.what):
            super().reduce_scatter(send, receive, label)
        own = send.parts[self.rank]
        return self._landed([own] if self.size == 1 else self._arrivals(own, receive))

    def all_reduce(self, chunk: torch.Tensor, *, what: str) -> Work:
        with self._recorder.labelled(what):
            super().all_reduce(chunk, what=what)
        return self._landed([chunk])

    def _arrivals(self, own: torch.Tensor, room: Chunks) -> list[torch.Tensor]:
        return [own, room.parts[0]] if self.size == 2 else [room.whole]

    def _landed(self, chunks: list[torch.Tensor]) -> Work:
        last = len(self._recorder.events) - 1
        is_under_way = self.size > 1 and isinstance(self._recorder.events[last], Transfer)
        return _Landed(chunks, self._recorder, last if is_under_way else None)


def paper_transport(group: dist.ProcessGroup, recorder: Recorder, *, on_host: bool) -> Transport:
    """Returns the transport that a group has on a CPU (`on_host`) or on an accelerator."""
    # As `transport_for` chooses, which asks the group's backend; here that is nobody.
    if on_host or group.size() == 1:
        return _PaperExchangeTransport(group, recorder)
    return _PaperStreamTransport(group, recorder)
