"""Collectives over chunks: one interface, and an implementation for each kind of process group.

`StreamTransport` uses the backend's collectives, ordered by streams. `NcclTransport` also groups
messages. `ExchangeTransport` is for gloo, whose reduce-scatter is an all-reduce inside and sends
twice the bytes: it uses an all-to-all, and the engine adds up the chunks as it writes gradients
(docs/design/collectives.md). `PairTransport` does the same between two ranks. `LocalTransport` is
for a group of one. The engine sends in the same way whatever the number of ranks.

[Note: Message tags]
A transport may match messages by order alone. If one rank skipped a unit, it would then deliver the
bytes of another unit of the same size, and only the numbers would be wrong. Where the host can read
received data, every chunk therefore ends in the tag of its message, and a chunk with another tag is
refused. The layout reserves space for it (`sharding/layout.py`). The message of a zero-copy
parameter has no tag, but follows one that has. A tag is three digits in base 128, which a byte and
every floating-point dtype in use represent exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import starmap
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    ReduceScatterOptions,
)

from shardgrad.diagnosis.flight_recorder import FIX, Entry, GroupLog, recorder
from shardgrad.engine.buffers import Chunks
from shardgrad.errors import DesyncError, unsupported
from shardgrad.sharding.layout import TAG_NUMEL

# torch 2.13 introduced these names; the old ones warn since then.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# The same for several messages in one launch.
_of_group = dist.ProcessGroup
_all_gathers = (
    getattr(_of_group, "all_gather_single_coalesced", None)
    or _of_group.allgather_into_tensor_coalesced
)
_reduce_scatters = (
    getattr(_of_group, "reduce_scatter_single_coalesced", None)
    or _of_group.reduce_scatter_tensor_coalesced
)
# Keeps them on the current stream, as single messages.
_GATHER_HERE, _REDUCE_HERE = AllgatherOptions(), ReduceScatterOptions()
_GATHER_HERE.asyncOp = _REDUCE_HERE.asyncOp = False

# This rank's chunk, the chunks of all ranks to receive (1-D, in rank order), and the tag.
GatherMessage = tuple[torch.Tensor, Chunks, "MessageTag"]
# The arguments of `Transport.reduce_scatter`.
ReduceMessage = tuple[Chunks, Chunks, "MessageTag"]

_BASE = 128
_known_tags: dict[int, str] = {}


@dataclass(frozen=True, eq=False)
class MessageTag:
    """A message's name ("all-gather of layers.3") and its tag. See [Note: Message tags].

    The digits are equal on every rank, least significant first; empty if the message has no tag.
    """

    what: str
    digits: tuple[int, ...] = ()

    @classmethod
    def of(cls, what: str, code: int) -> MessageTag:
        """Returns the tag with number `code`, and registers its name for error messages."""
        _known_tags[code] = what
        return cls(what, tuple(code // _BASE**i % _BASE for i in range(TAG_NUMEL)))


@lru_cache(maxsize=1024)  # each step sends the same messages
def _digits(tag: MessageTag, dtype: torch.dtype) -> torch.Tensor:
    """Returns what a chunk of the message ends in."""
    return torch.tensor(tag.digits, dtype=dtype, device="cpu")


def _meaning(digits: list[float]) -> str:
    """Returns the name of a received tag on this rank."""
    code = sum(
        int(digit) * _BASE**i for i, digit in enumerate(digits) if digit == digit and digit >= 0
    )
    return _known_tags.get(code, "unknown message")


@dataclass(eq=False)
class Work:
    """A collective, in flight or with nothing to wait for."""

    _chunks: Sequence[torch.Tensor]

    def wait(self) -> Sequence[torch.Tensor]:
        """Returns the chunks to add up (1-D, equal sizes, one per source), or all gathered ones.

        Gathered chunks are in one tensor. Call it once.

        Streams: the launching stream orders the result; an exchange blocks the host until the data
        has arrived.

        Raises:
            CollectiveError: the backend reported a failure or a time-out.
            DesyncError: another rank sent a different message.
        """
        return self._chunks


class Transport(ABC):
    """The collectives of one process group.

    Attributes:
        sends: False if nothing leaves this rank.
        stream_ordered: the launching stream orders results; the host need not block.
        gather_chunks: staging chunks of `all_gather`; 0 if it returns its input.
        receive_chunks: chunks that `reduce_scatter` receives besides `send`.
    """

    sends = True
    stream_ordered = True
    receive_chunks = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self._log = recorder.group_log(group)

    @abstractmethod
    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """Gathers the chunks of all ranks into `staging`, `gather_chunks` chunks in rank order.

        `chunk` is 1-D with room for the tag at its end, and may be this rank's part of `staging`.
        It must not change before the work has been waited for.
        """

    @abstractmethod
    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """Collects chunks that add up to this rank's part of the sum over ranks.

        `send` has `size` chunks, the k-th for rank k, each with room for the tag at its end.
        `receive` has `receive_chunks` more. If that is 0, `receive` may have one chunk, which gets
        the sum, and `send` is only read. The work may return one chunk, already summed, in `send`
        or in `receive`.
        """

    def all_gathers(self, messages: Sequence[GatherMessage]) -> list[Work]:
        """Starts the all-gather of each message."""
        return list(starmap(self.all_gather, messages))

    def reduce_scatters(self, messages: Sequence[ReduceMessage]) -> list[Work]:
        """Starts the reduce-scatter of each message."""
        return list(starmap(self.reduce_scatter, messages))

    def all_reduce(self, chunk: torch.Tensor, tag: MessageTag) -> Work:
        """Sums `chunk` over the ranks, in place; its message has no room for a tag."""
        call = partial(dist.all_reduce, chunk, group=self.group, async_op=True)
        return self._start(call, [chunk], tag)

    def all_to_all(
        self,
        into: torch.Tensor,
        out: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        tag: MessageTag,
    ) -> Work:
        """Sends to each rank the next `sent` elements of `out`; its message has no room for a tag.

        `out` must not change before the work has been waited for. Unlike the other collectives, it
        does not run in the order of the current stream, which waits for it in `Work.wait`.
        """
        splits = list(received), list(sent)
        call = partial(dist.all_to_all_single, into, out, *splits, group=self.group, async_op=True)
        return self._start(call, [into], tag)

    def _start(
        self,
        call: Callable[[], dist.Work | None],
        chunks: Sequence[torch.Tensor],
        tag: MessageTag,
        tagged: tuple[torch.Tensor, Chunks] | None = None,
    ) -> Work:
        """Starts a collective by `call`; its work returns `chunks`.

        `tagged` has the ends of what is sent, into which the tag is written, and the chunks that
        are received. Their ends are wiped first, so that a message too short for a tag is not taken
        for an earlier one.
        """
        received = None
        if tagged is not None and tag.digits:
            ends, received = tagged
            received.ends.fill_(-1)
            # Last, because sent chunks may be among the received ones.
            ends.copy_(_digits(tag, ends.dtype))
        entry = self._log.record(tag.what)  # first, so that it is known if `call` never returns
        try:
            work = call()
        except RuntimeError as error:
            raise entry.failed(error) from error
        return PendingWork(chunks, entry, work, self._log, tag, received)


@dataclass(eq=False)
class PendingWork(Work):
    """Work of a backend; None if streams order it.

    All chunks in `_received` must end in the tag, and the host can read them.
    """

    _entry: Entry
    _work: dist.Work | None
    _log: GroupLog
    _tag: MessageTag
    _received: Chunks | None

    def wait(self) -> Sequence[torch.Tensor]:
        """See `Work`."""
        if self._work is not None:
            self._log.wait_for(self._work, self._entry)
        if self._received is not None:
            # The host has waited already, so reading the tags does not block it further.
            expected, received = list(self._tag.digits), self._received.ends.tolist()
            for sender, digits in enumerate(received):
                if digits != expected:
                    self._refuse(sender, digits, is_of_pair=len(received) == 1)
        return self._chunks

    def _refuse(self, sender: int, digits: list[float], *, is_of_pair: bool) -> NoReturn:
        recorder.waits_in = self._entry
        members = self._entry.ranks
        if is_of_pair:  # whose own chunk is not sent
            sender = 1 - members.index(dist.get_rank())
        raise DesyncError(
            f"rank {members[sender]} is out of sync: it sent the {_meaning(digits)}",
            expected=f"the {self._tag.what} from every rank of {list(members)}",
            got=f"the {_meaning(digits)}",
            where=f"rank {dist.get_rank()}",
            fix=FIX,
        )


class LocalTransport(Transport):
    """A group of one rank, which receives what it sends."""

    sends = False

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`: the chunk is read in place."""
        return Work([chunk])

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`."""
        return Work(send.parts)

    def all_reduce(self, chunk: torch.Tensor, tag: MessageTag) -> Work:
        """See `Transport.all_reduce`."""
        return Work([chunk])


class StreamTransport(Transport):
    """The backend's own collectives, issued on the current stream.

    It uses no tags, because reading them would block the host. The backend's time-out and flight
    recorder show a desync.
    """

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`. Capture: safe once the communicator exists."""
        call = partial(_all_gather, staging.whole, chunk, group=self.group)
        return self._start(call, [staging.whole], tag)

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`. Without `receive` it is in place, in this
        rank's chunk.
        """
        own = self._own(send, receive)
        call = partial(_reduce_scatter, own, send.whole, group=self.group)
        return self._start(call, [own], tag)

    def _own(self, send: Chunks, receive: Chunks) -> torch.Tensor:
        # NCCL reduces in place if the result is this rank's part of its input.
        return receive.part(0) if receive.count else send.part(self.rank)


class NcclTransport(StreamTransport):
    """NCCL's collectives, which it can group: several messages take one launch."""

    def all_gathers(self, messages: Sequence[GatherMessage]) -> list[Work]:
        """See `Transport.all_gathers`. Capture: as safe as one message."""
        if len(messages) == 1:
            return super().all_gathers(messages)
        chunks, staging, tags = zip(*messages, strict=True)
        whole = [each.whole for each in staging]
        call = partial(_all_gathers, self.group, whole, list(chunks), _GATHER_HERE)
        return [self._start(call, whole, tags[0])]

    def reduce_scatters(self, messages: Sequence[ReduceMessage]) -> list[Work]:
        """See `Transport.reduce_scatters`. Capture: as safe as one message."""
        if len(messages) == 1:
            return super().reduce_scatters(messages)
        send, receive, tags = zip(*messages, strict=True)
        own, whole = list(map(self._own, send, receive)), [each.whole for each in send]
        call = partial(_reduce_scatters, self.group, own, whole, _REDUCE_HERE)
        first = self._start(call, own[:1], tags[0])
        return [first, *(Work([each]) for each in own[1:])]


class ExchangeTransport(Transport):
    """Sends chunks directly to the ranks that add them up, in the order of gloo's ring."""

    stream_ordered = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.receive_chunks = self.size

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`."""
        # Asynchronous, so that the host packs and launches while gloo's threads send.
        call = partial(_all_gather, staging.whole, chunk, group=self.group, async_op=True)
        return self._start(call, [staging.whole], tag, (chunk[-TAG_NUMEL:], staging))

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`.

        Chunks are in the order in which gloo's ring adds them: from the previous rank downwards,
        this rank's own last.
        """
        call = partial(
            dist.all_to_all_single, receive.whole, send.whole, group=self.group, async_op=True
        )
        chunks = [receive.parts[self.rank - 1 - further] for further in range(self.size)]
        return self._start(call, chunks, tag, (send.ends, receive))


class PairTransport(ExchangeTransport):
    """An `ExchangeTransport` between two ranks: one chunk goes each way."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.receive_chunks = 1  # this rank's own chunk is not sent
        self._other = 1 - self.rank

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`."""
        own, taken = staging.parts[self.rank], staging.parts[self._other]
        # The copy-out reads all chunks from staging, including this rank's own.
        if chunk is not own:
            own.copy_(chunk)
        tagged = own[-TAG_NUMEL:], staging
        return self._start(self._swap(own, taken), [staging.whole], tag, tagged)

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`. A sum of two does not depend on their order."""
        kept, given, taken = send.parts[self.rank], send.parts[self._other], receive.whole
        return self._start(self._swap(given, taken), [kept, taken], tag, (send.ends, receive))

    def _swap(self, given: torch.Tensor, taken: torch.Tensor) -> Callable[[], dist.Work]:
        # Nothing is sent from this rank to itself.
        splits = [0, 0]
        splits[self._other] = given.numel()
        return partial(
            dist.all_to_all_single, taken, given, splits, splits, group=self.group, async_op=True
        )


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns the name of a group's backend for tensors on `device`, or None."""
    return dict(item.split(":") for item in dist.get_backend_config(group).split(",")).get(
        device.type
    )


def transport_for(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Returns the transport of a group for tensors on `device`."""
    # A single rank receives what it sends, so no backend is needed, not even NCCL, which would
    # copy.
    if group.size() == 1:
        return LocalTransport(group)
    backend = backend_for(group, device)
    if backend != "gloo":
        return NcclTransport(group) if backend == "nccl" else StreamTransport(group)
    # gloo would copy each tensor through the host, in an order that streams do not know.
    if device.type != "cpu":
        raise unsupported(
            f"gloo for tensors on {device.type}", instead="a backend of the device, such as nccl"
        )
    return PairTransport(group) if group.size() == 2 else ExchangeTransport(group)
