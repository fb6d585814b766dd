"""Moving chunks between ranks: one seam, two ways.

`StreamTransport` uses the backend's own all-gather and reduce-scatter (NCCL and its kin), ordered by streams.
`ExchangeTransport` is for gloo, whose reduce-scatter is an all-reduce inside and sends twice the bytes: an
all-to-all brings every rank its chunks, and the engine adds them up in the pass that writes the gradients
(docs/design/collectives.md has the measurement).

Both return a *flight*; waiting for it gives the chunks that have to be copied out, or summed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from shardgrad.diagnosis.flight_recorder import Entry, Line, journal
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.message_tag import MessageTag, words_for
from shardgrad.errors import CollectiveError, DesyncError, unsupported

__all__ = [
    "ExchangeTransport",
    "StreamTransport",
    "Transport",
    "Work",
    "checked",
    "reaches",
    "transport_for",
]

_T = TypeVar("_T")

# torch 2.13 gave these two new names; the old ones warn from then on.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> list[torch.Tensor]:
        """Returns the chunks, one per source (1-D, equal sizes); call it once.

        Streams: stream transports are ordered by the stream they were launched on; exchanges block the host
        until the data has arrived.

        Raises:
            CollectiveError: the backend reported a failure or a time-out.
            DesyncError: another rank sent something else.
        """


class Transport(ABC):
    """Chunk movement inside one process group.

    Attributes:
        stream_ordered: True if results are ordered by the launching stream, so nobody has to block the host.
        gather_chunks: staging chunks that `all_gather` needs.
        gathers_in_place: True if this rank's chunk may be its own part of the staging.
        receive_chunks: staging chunks that `reduce_scatter` needs besides those it is given.
    """

    stream_ordered: bool
    gather_chunks: int
    gathers_in_place: bool
    receive_chunks: int

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self._line = journal.line(group)

    @abstractmethod
    def all_gather(self, chunk: torch.Tensor, staging: Chunks, label: MessageTag) -> Work:
        """Gathers everybody's chunk.

        Args:
            chunk: this rank's, 1-D, ending in the label; must stay unchanged until the flight was waited for.
            staging: `gather_chunks` chunks like it; see `missing`.
            label: what every rank is expected to send.
        """

    def missing(self, places: Chunks) -> Chunks:
        """Returns which of places for everybody's chunk an `all_gather` fills: `gather_chunks` of them.

        If that is not all, the others are for who calls to fill.
        """
        return places

    @abstractmethod
    def reduce_scatter(self, send: Chunks, receive: Chunks, label: MessageTag) -> Work:
        """Brings together everybody's chunk for this rank.

        Args:
            send: `size` chunks, the k-th for rank k, each ending in the label.
            receive: room for `receive_chunks` more; or one chunk where none is needed, which then gets the
                sum, and `send` is only read.
            label: what every rank is expected to send.

        Returns:
            A flight whose chunks add up to the sum over ranks; possibly already added up into one chunk
            that lies inside `send`, or in `receive`.
        """

    def all_reduce(self, chunk: torch.Tensor, *, what: str) -> Work:
        """Sums `chunk` over the ranks, in place."""
        if self.size == 1:
            return _Arrived([chunk])
        entry = self._line.begin(what, chunk)
        work = checked(what, self.group, lambda: dist.all_reduce(chunk, group=self.group, async_op=True))
        return _Waiting(work, [chunk], entry, self._line, self.group)

    def started(
        self, call: Callable[[], dist.Work | None], sent: torch.Tensor, chunks: list[torch.Tensor], what: str
    ) -> Work:
        """Calls somebody's collective, which sends `sent`. The work it returns, if any, ends the flight."""
        entry = self._line.begin(what, sent)
        work = checked(what, self.group, call)
        return _Arrived(chunks) if work is None else _Waiting(work, chunks, entry, self._line, self.group)


class _Arrived:
    """A flight with nothing to wait for."""

    def __init__(self, chunks: list[torch.Tensor]) -> None:
        self._chunks = chunks

    def wait(self) -> list[torch.Tensor]:
        return self._chunks


class _Waiting:
    """A flight that a backend's work ends."""

    def __init__(
        self,
        work: dist.Work | None,
        chunks: list[torch.Tensor],
        entry: Entry,
        line: Line,
        group: dist.ProcessGroup,
    ) -> None:
        self._work = work
        self._chunks = chunks
        self._entry = entry
        self._line = line
        self._group = group

    def wait(self) -> list[torch.Tensor]:
        if self._work is not None:
            journal.waits_in = self._line, self._entry
            checked(self._entry.what, self._group, self._work.wait)
            journal.waits_in = None  # not if it raised: then it is what is asked for
        return self._chunks


class _Exchange(_Waiting):
    """A flight whose chunks carry labels that the host can read."""

    def __init__(
        self,
        work: dist.Work | None,
        chunks: list[torch.Tensor],
        label: MessageTag,
        entry: Entry,
        line: Line,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(work, chunks, entry, line, group)
        self._label = label

    def wait(self) -> list[torch.Tensor]:
        chunks = super().wait()
        expected = list(self._label.digits)
        for source, chunk in enumerate(chunks):
            digits = _end(chunk, self._label).tolist()
            if digits != expected:
                journal.waits_in = self._line, self._entry
                members = dist.get_process_group_ranks(self._group)
                raise DesyncError(
                    f"rank {members[source]} is somewhere else: it sent the {words_for(digits)}",
                    expected=f"the {self._label.what} from every rank of {members}",
                    got=f"the {words_for(digits)}",
                    where=f"rank {dist.get_rank()}",
                    fix=_FIX,
                )
        return chunks


_FIX = (
    "if ranks legitimately run different units or have no batch, wrap the step in "
    "`with shardgrad.participate(model):`; else look for the first error among the ranks"
)


def _end(chunk: torch.Tensor, label: MessageTag) -> torch.Tensor:
    """Returns where a chunk has the label; nothing if it carries none."""
    length = len(label.digits)
    return chunk.narrow(0, chunk.numel() - length, length)


def checked(what: str, group: dist.ProcessGroup, call: Callable[[], _T]) -> _T:
    """Calls the backend, turning its errors into ours."""
    try:
        return call()
    except RuntimeError as error:
        raise CollectiveError(
            f"the {what} failed: another rank is late, gone, or running something else",
            expected=f"every rank of {dist.get_process_group_ranks(group)} to join it",
            got=str(error).splitlines()[0],
            where=f"rank {dist.get_rank()}",
            fix=_FIX,
        ) from error


class StreamTransport(Transport):
    """The backend's own collectives, issued on the current stream.

    Labels travel along and are not read, since that would make the host wait; the backend's own time-out
    and flight recorder have to tell.
    """

    stream_ordered = True
    gathers_in_place = True
    receive_chunks = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.gather_chunks = self.size

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, label: MessageTag) -> Work:
        """See `Transport.all_gather`. Capture: safe once the communicator exists."""
        self._line.begin(label.what, chunk)
        checked(label.what, self.group, lambda: _all_gather(staging.whole, chunk, group=self.group))
        return _Arrived(list(staging.parts))

    def reduce_scatter(self, send: Chunks, receive: Chunks, label: MessageTag) -> Work:
        """See `Transport.reduce_scatter`. In place if there is no room: in this rank's chunk of `send`."""
        own = receive.parts[0] if receive.parts else send.parts[self.rank]
        self._line.begin(label.what, own)
        checked(label.what, self.group, lambda: _reduce_scatter(own, send.whole, group=self.group))
        return _Arrived([own])


class ExchangeTransport(Transport):
    """Chunks go straight to the rank that needs them; also the transport of a group of one.

    Between two ranks only what the other needs is sent, without a copy of one's own chunk on either side.
    """

    gathers_in_place = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.stream_ordered = self.size == 1
        self.gather_chunks = self.receive_chunks = {1: 0, 2: 1}.get(self.size, self.size)

    def missing(self, places: Chunks) -> Chunks:
        """See `Transport.missing`: between two ranks, what the other has."""
        if self.size != 2:
            return places
        other = places.parts[1 - self.rank]
        return Chunks(other, (other,))

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, label: MessageTag) -> Work:
        """See `Transport.all_gather`."""
        if self.size == 1:
            return _Arrived([chunk])
        entry = self._line.begin(label.what, chunk)
        self._forget_labels(staging.parts, label)
        if self.size == 2:
            return self._swap(chunk, chunk, staging.parts[0], label, entry)
        work = checked(
            label.what,
            self.group,
            lambda: _all_gather(staging.whole, chunk, group=self.group, async_op=True),
        )
        return _Exchange(work, list(staging.parts), label, entry, self._line, self.group)

    def reduce_scatter(self, send: Chunks, receive: Chunks, label: MessageTag) -> Work:
        """See `Transport.reduce_scatter`. Chunks come back in rank order, so every sum has one order."""
        if self.size == 1:
            return _Arrived([send.parts[0]])
        entry = self._line.begin(label.what, send.parts[0])
        self._forget_labels(receive.parts, label)
        if self.size == 2:
            return self._swap(
                send.parts[self.rank], send.parts[1 - self.rank], receive.parts[0], label, entry
            )
        work = checked(
            label.what,
            self.group,
            lambda: dist.all_to_all_single(receive.whole, send.whole, group=self.group, async_op=True),
        )
        return _Exchange(work, list(receive.parts), label, entry, self._line, self.group)

    def _swap(
        self, kept: torch.Tensor, given: torch.Tensor, taken: torch.Tensor, label: MessageTag, entry: Entry
    ) -> Work:
        """Gives the other of two ranks one chunk and takes one."""
        splits = [0, 0]
        splits[1 - self.rank] = given.numel()

        def swap() -> dist.Work | None:
            work: dist.Work | None = dist.all_to_all_single(
                taken, given, splits, splits, group=self.group, async_op=True
            )
            return work

        chunks = [kept, taken] if self.rank == 0 else [taken, kept]
        work = checked(label.what, self.group, swap)
        return _Exchange(work, chunks, label, entry, self._line, self.group)

    @staticmethod
    def _forget_labels(chunks: Sequence[torch.Tensor], label: MessageTag) -> None:
        """Wipes labels of earlier messages, so that a message too short to have one is not taken for them."""
        if label.digits:
            for chunk in chunks:
                _end(chunk, label).fill_(-1)


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns the name of the backend that a group has for tensors on `device`; None if it has none."""
    return dict(item.split(":") for item in dist.get_backend_config(group).split(",")).get(device.type)


def reaches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether tensors on `device` can travel in a group."""
    return _backend_for(group, device) is not None


def transport_for(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Chooses the transport of a group for tensors on `device`."""
    if group.size() == 1:
        return ExchangeTransport(group)
    gloo = _backend_for(group, device) == "gloo"
    if gloo and device.type != "cpu":
        raise unsupported(f"gloo for tensors on {device.type}", instead="the device's backend, such as nccl")
    return ExchangeTransport(group) if gloo else StreamTransport(group)
