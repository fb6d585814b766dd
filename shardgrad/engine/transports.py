"""Moving chunks between ranks: one interface, and an implementation for each kind of group.

`StreamTransport` uses the backend's collectives, ordered by streams; `NcclTransport` also groups
messages. `ExchangeTransport` is for gloo, whose reduce-scatter is an all-reduce inside and sends
twice the bytes: it uses an all-to-all, and the engine adds up the chunks as it writes gradients
(docs/design/collectives.md). `PairTransport` does the same between two ranks, and `LocalTransport`
is for a group of one. Nothing else in the engine asks how many ranks there are.

[Note: Message tags]
A transport that matches messages by order alone would, if one rank skipped a unit, deliver the
bytes of another unit of the same size, and only the numbers would be wrong. Where the host can read
what has arrived, every chunk therefore ends in the tag of its message, and is refused if the tag is
not the expected one. A layout reserves the room (`sharding/layout.py`); the message of a zero-copy
parameter has none, but follows one that has. A tag is three digits to the base 128, which every
floating-point dtype in use, and a byte, holds exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from shardgrad.diagnosis.flight_recorder import FIX, Entry, GroupLog, recorder
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.tracing import NOTHING
from shardgrad.errors import DesyncError, unsupported
from shardgrad.sharding.layout import TAG_NUMEL

__all__ = [
    "CompletedWork",
    "ExchangeTransport",
    "LocalTransport",
    "MessageTag",
    "NcclTransport",
    "PairTransport",
    "PendingWork",
    "StreamTransport",
    "Transport",
    "Work",
    "reaches",
    "transport_for",
]


# torch 2.13 gave these two new names; the old ones warn from then on.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_BASE = 128
_known_tags: dict[int, str] = {}


@dataclass(frozen=True, eq=False)
class MessageTag:
    """A message's name ("all-gather of layers.3") and its tag. See [Note: Message tags].

    The digits are the same on every rank, least significant first; none if there is no room for a
    tag.
    """

    what: str
    digits: tuple[int, ...] = ()

    @classmethod
    def of(cls, what: str, code: int) -> MessageTag:
        """Makes the tag with a number, and remembers what it stands for."""
        _known_tags[code] = what
        return cls(what, tuple(code // _BASE**i % _BASE for i in range(TAG_NUMEL)))


_NO_TAG, _NOTHING_RECEIVED = MessageTag(""), Chunks(torch.empty(0), 0)


def _meaning(digits: list[float]) -> str:
    """Returns what a received tag stands for on this rank."""
    code = sum(
        int(digit) * _BASE**i for i, digit in enumerate(digits) if digit == digit and digit >= 0
    )
    return _known_tags.get(code, "something this rank does not know")


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Sequence[torch.Tensor]:
        """Returns the chunks to be added up, one per source (1-D, equal sizes), or all that were
        gathered, in one tensor; call it once.

        Streams: ordered by the launching stream; an exchange blocks the host until the data has
        arrived.

        Raises:
            CollectiveError: the backend reported a failure or a time-out.
            DesyncError: another rank sent something else.
        """


class Transport(ABC):
    """Chunk movement inside one process group."""

    sends: bool  # False if nothing leaves this rank
    stream_ordered: bool  # results are ordered by the launching stream, so the host need not block
    gather_chunks: int  # staging chunks of `all_gather`; 0 if the chunk is all that there is
    receive_chunks: int  # staging chunks that `reduce_scatter` needs besides those it is given

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self._log = recorder.group_log(group)

    @abstractmethod
    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """Gathers the chunks of all ranks into `staging`, `gather_chunks` chunks in rank order.

        `chunk` is 1-D with room for the tag at its end, and may be this rank's part of `staging`.
        It must not change until the work was waited for.
        """

    @abstractmethod
    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """Brings together what all ranks have for this one: chunks that add up to the sum over
        ranks.

        `send` has `size` chunks, the k-th for rank k, each with room for the tag at its end;
        `receive` has `receive_chunks` more. Where none is needed it may have one, which gets the
        sum, and `send` is only read. The work may end with one chunk, already summed, inside `send`
        or in `receive`.
        """

    def together(self) -> AbstractContextManager[object]:
        """Returns the context in which to start several messages of a group, of one kind."""
        return NOTHING

    def all_reduce(self, chunk: torch.Tensor, *, what: str) -> Work:
        """Sums `chunk` over the ranks, in place."""
        call = partial(dist.all_reduce, chunk, group=self.group, async_op=True)
        entry, work = self._log.start(what, chunk, call)
        return PendingWork(entry, work, [chunk], self._log)


class CompletedWork:
    """Work with nothing to wait for."""

    __slots__ = ("_chunks",)

    def __init__(self, chunks: Sequence[torch.Tensor]) -> None:
        self._chunks = chunks

    def wait(self) -> Sequence[torch.Tensor]:
        """See `Work`."""
        return self._chunks


@dataclass(eq=False)
class PendingWork:
    """Work that a backend's own work ends. All that it has `_received` ends in `_tag`, if that has
    digits, which the host can read.
    """

    _entry: Entry
    _work: dist.Work | None
    _chunks: Sequence[torch.Tensor]
    _log: GroupLog
    _tag: MessageTag = _NO_TAG
    _received: Chunks = _NOTHING_RECEIVED

    def wait(self) -> Sequence[torch.Tensor]:
        """See `Work`."""
        if self._work is not None:
            self._log.wait_for(self._work, self._entry)
        if self._tag.digits:
            # The host has waited already, so reading what arrived costs no further wait.
            expected = list(self._tag.digits)
            for sender, digits in enumerate(self._received.ends.tolist()):
                if digits != expected:
                    self._refuse(sender, digits)
        return self._chunks

    def _refuse(self, sender: int, digits: list[float]) -> NoReturn:
        recorder.waits_in = self._log, self._entry
        members = self._log.ranks
        if self._received.count < len(members):  # a pair's own chunk has not travelled
            sender = 1 - members.index(dist.get_rank())
        raise DesyncError(
            f"rank {members[sender]} is somewhere else: it sent the {_meaning(digits)}",
            expected=f"the {self._tag.what} from every rank of {list(members)}",
            got=f"the {_meaning(digits)}",
            where=f"rank {dist.get_rank()}",
            fix=FIX,
        )


class LocalTransport(Transport):
    """A group of one rank, where what is sent is also what arrives."""

    sends = False
    stream_ordered = True
    gather_chunks = 0
    receive_chunks = 0

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`: the chunk is read where it is."""
        return CompletedWork((chunk,))

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`."""
        return CompletedWork(send.parts)

    def all_reduce(self, chunk: torch.Tensor, *, what: str) -> Work:
        """See `Transport.all_reduce`."""
        return CompletedWork((chunk,))


class StreamTransport(Transport):
    """The backend's own collectives, issued on the current stream.

    No tags: reading them would block the host; the backend's time-out and flight recorder show a
    desync.
    """

    sends = True
    stream_ordered = True
    receive_chunks = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.gather_chunks = self.size

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`. Capture: safe once the communicator exists."""
        call = partial(_all_gather, staging.whole, chunk, group=self.group)
        self._log.start(tag.what, chunk, call)
        return CompletedWork((staging.whole,))

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`. In place if there is no room: in this rank's chunk of
        `send`.
        """
        # NCCL reduces in place where the result is this rank's part of what it sends.
        own = receive.part(0) if receive.count else send.part(self.rank)
        call = partial(_reduce_scatter, own, send.whole, group=self.group)
        self._log.start(tag.what, own, call)
        return CompletedWork((own,))


class NcclTransport(StreamTransport):
    """NCCL's collectives, which it can group: several messages are one launch."""

    def together(self) -> AbstractContextManager[object]:
        """See `Transport.together`. Capture: as safe as one message."""
        return _coalescing_manager(self.group)


class ExchangeTransport(Transport):
    """Sends chunks straight to the ranks that add them up, in the order of gloo's ring."""

    sends = True
    stream_ordered = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.gather_chunks = self.receive_chunks = self.size
        self._digits: dict[tuple[MessageTag, torch.dtype], torch.Tensor] = {}

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`."""
        # Asynchronous, so that the host packs and launches while gloo's threads move bytes.
        call = partial(_all_gather, staging.whole, chunk, group=self.group, async_op=True)
        return self._start(call, chunk, chunk[-TAG_NUMEL:], (staging.whole,), staging, tag)

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`. Chunks come back in the order in which gloo's ring adds
        them: from the rank before this one downwards, this rank's own last.
        """
        call = partial(
            dist.all_to_all_single, receive.whole, send.whole, group=self.group, async_op=True
        )
        chunks = [receive.parts[self.rank - 1 - further] for further in range(self.size)]
        return self._start(call, send.part(0), send.ends, chunks, receive, tag)

    def _start(
        self,
        call: Callable[[], dist.Work],
        sent: torch.Tensor,
        ends: torch.Tensor,
        chunks: Sequence[torch.Tensor],
        received: Chunks,
        tag: MessageTag,
    ) -> Work:
        """Writes the tag at the ends of what is sent, and wipes old ones where it arrives; then
        makes the call.

        A message too short to have a tag is then not taken for an earlier one.
        """
        if tag.digits:
            key = tag, ends.dtype
            digits = self._digits.get(key)
            if digits is None:
                digits = torch.tensor(tag.digits, dtype=ends.dtype, device=ends.device)
                self._digits[key] = digits
            received.ends.fill_(-1)
            ends.copy_(digits)  # last: what is sent may be among what is received
        entry, work = self._log.start(tag.what, sent, call)
        return PendingWork(entry, work, chunks, self._log, tag, received)


class PairTransport(ExchangeTransport):
    """The same between two ranks, where a chunk goes one way and a chunk comes back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.receive_chunks = 1  # this rank's own stays where it is
        self._other = 1 - self.rank

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`."""
        own, taken = staging.parts[self.rank], staging.parts[self._other]
        # The copy-out reads all chunks from staging, this rank's own as well.
        if chunk is not own:
            own.copy_(chunk)
        return self._swap(own, taken, own[-TAG_NUMEL:], (staging.whole,), staging, tag)

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`. A sum of two has one order, whichever comes first."""
        kept, given, taken = send.parts[self.rank], send.parts[self._other], receive.whole
        return self._swap(given, taken, send.ends, (kept, taken), receive, tag)

    def _swap(
        self,
        given: torch.Tensor,
        taken: torch.Tensor,
        ends: torch.Tensor,
        chunks: Sequence[torch.Tensor],
        received: Chunks,
        tag: MessageTag,
    ) -> Work:
        # Nothing travels from this rank to itself.
        splits = [0, 0]
        splits[self._other] = given.numel()
        call = partial(
            dist.all_to_all_single, taken, given, splits, splits, group=self.group, async_op=True
        )
        return self._start(call, given, ends, chunks, received, tag)


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns the name of the backend that a group has for tensors on `device`; None if it has
    none.
    """
    return dict(item.split(":") for item in dist.get_backend_config(group).split(",")).get(
        device.type
    )


def reaches(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether tensors on `device` can travel in a group."""
    return _backend_for(group, device) is not None


def transport_for(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Chooses the transport of a group for tensors on `device`."""
    # What one rank sends is what it receives; no backend is asked, not even NCCL, whose launches
    # would only copy.
    if group.size() == 1:
        return LocalTransport(group)
    backend = _backend_for(group, device)
    if backend != "gloo":
        return NcclTransport(group) if backend == "nccl" else StreamTransport(group)
    # gloo would take each tensor over the host, in an order that streams know nothing of.
    if device.type != "cpu":
        raise unsupported(
            f"gloo for tensors on {device.type}", instead="the device's backend, such as nccl"
        )
    return PairTransport(group) if group.size() == 2 else ExchangeTransport(group)
