"""Moving chunks between ranks: one seam, two ways.

`StreamTransport` uses the backend's own all-gather and reduce-scatter (NCCL and its kin), ordered by streams.
`PairwiseTransport` sends each peer its chunk directly. gloo's own collectives cost two to three times as much
for the same result: its reduce-scatter is an all-reduce inside, and its all-gather makes `world_size - 1`
hops (docs/design/collectives.md has the measurement). The bytes sent are those of a perfect reduce-scatter.

Both return a *flight*; waiting for it gives the chunks that have to be copied out, or summed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from .buffers import Chunks
from .errors import CollectiveError

__all__ = ["Flight", "PairwiseTransport", "StreamTransport", "Transport", "transport_for"]

# gloo matches messages by (peer, tag). Tags of our own keep the engine's traffic apart from the user's, and
# give every group and purpose its own channel: a rank that runs another unit can delay us until the
# time-out, but can never hand us that unit's bytes.
_FIRST_TAG = 0x5347 << 12

_T = TypeVar("_T")


class Flight(Protocol):
    """A collective under way."""

    def wait(self) -> list[torch.Tensor]:
        """Returns the chunks, one per source (1-D, equal sizes); call it once.

        Streams: stream transports are ordered by the stream they were launched on; pairwise ones block the
        host until the data has arrived.

        Raises:
            CollectiveError: the backend reported a failure or a time-out.
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

    @abstractmethod
    def all_gather(self, chunk: torch.Tensor, staging: Chunks, *, what: str, channel: int) -> Flight:
        """Gathers everybody's chunk.

        Args:
            chunk: this rank's, 1-D; must stay unchanged until the flight was waited for.
            staging: `gather_chunks` chunks like it.
            what: named in errors, for example "all-gather of layers.3".
            channel: the same number on every rank for the same group and purpose.
        """

    @abstractmethod
    def reduce_scatter(self, send: Chunks, receive: Chunks, *, what: str, channel: int) -> Flight:
        """Brings together everybody's chunk for this rank.

        Args:
            send: `size` chunks, the k-th for rank k.
            receive: room for `receive_chunks` more.
            what: named in errors.
            channel: as in `all_gather`.

        Returns:
            A flight whose chunks add up to the sum over ranks; possibly already added up into one chunk
            that lies inside `send`.
        """

    def all_reduce(self, chunk: torch.Tensor, *, what: str) -> Flight:
        """Sums `chunk` over the ranks, in place."""
        if self.size == 1:
            return _Arrived([chunk])
        work = _checked(what, self.group, lambda: dist.all_reduce(chunk, group=self.group, async_op=True))
        return _Works([] if work is None else [work], [chunk], what, self.group)


class _Arrived:
    """A flight with nothing to wait for."""

    def __init__(self, chunks: list[torch.Tensor]) -> None:
        self._chunks = chunks

    def wait(self) -> list[torch.Tensor]:
        return self._chunks


class _Works:
    """A flight made of backend works."""

    def __init__(
        self, works: list[dist.Work], chunks: list[torch.Tensor], what: str, group: dist.ProcessGroup
    ) -> None:
        self._works = works
        self._chunks = chunks
        self._what = what
        self._group = group

    def wait(self) -> list[torch.Tensor]:
        for work in self._works:
            _checked(self._what, self._group, work.wait)
        return self._chunks


def _checked(what: str, group: dist.ProcessGroup, call: Callable[[], _T]) -> _T:
    """Calls the backend, turning its errors into ours."""
    try:
        return call()
    except RuntimeError as error:
        members = dist.get_process_group_ranks(group)
        raise CollectiveError(
            f"the {what} failed: another rank is late, gone, or running something else",
            expected=f"every rank of {members} to join it",
            got=str(error).splitlines()[0],
            where=f"rank {dist.get_rank()}",
            fix="look for the first error among the ranks; if ranks legitimately run different units or "
            "have no batch, wrap the step in `with shardgrad.participate(model):`",
        ) from error


class StreamTransport(Transport):
    """The backend's own collectives, issued on the current stream."""

    stream_ordered = True
    gathers_in_place = True
    receive_chunks = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.gather_chunks = self.size

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, *, what: str, channel: int) -> Flight:
        """See `Transport.all_gather`. Capture: safe once the communicator exists."""
        _checked(
            what, self.group, lambda: dist.all_gather_into_tensor(staging.whole, chunk, group=self.group)
        )
        return _Arrived(list(staging.parts))

    def reduce_scatter(self, send: Chunks, receive: Chunks, *, what: str, channel: int) -> Flight:
        """See `Transport.reduce_scatter`. In place: the sum lands in this rank's chunk of `send`."""
        own = send.parts[self.rank]
        _checked(what, self.group, lambda: dist.reduce_scatter_tensor(own, send.whole, group=self.group))
        return _Arrived([own])


class PairwiseTransport(Transport):
    """Direct messages between every two ranks; also the transport of a group of one."""

    gathers_in_place = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.stream_ordered = self.size == 1
        self.gather_chunks = self.receive_chunks = self.size - 1
        self._peers = [rank for rank in range(self.size) if rank != self.rank]

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, *, what: str, channel: int) -> Flight:
        """See `Transport.all_gather`. This rank's chunk is returned as it is, never copied."""
        if not self._peers:
            return _Arrived([chunk])
        chunks = [*staging.parts[: self.rank], chunk, *staging.parts[self.rank :]]
        receives = [(peer, chunks[peer]) for peer in self._peers]
        return self._exchange(receives, [(peer, chunk) for peer in self._peers], chunks, what, channel)

    def reduce_scatter(self, send: Chunks, receive: Chunks, *, what: str, channel: int) -> Flight:
        """See `Transport.reduce_scatter`. Chunks come back in rank order, so every sum has one order."""
        outgoing, incoming = send.parts, receive.parts
        if not self._peers:
            return _Arrived([outgoing[0]])
        chunks = [*incoming[: self.rank], outgoing[self.rank], *incoming[self.rank :]]
        receives = [(peer, chunks[peer]) for peer in self._peers]
        return self._exchange(
            receives, [(peer, outgoing[peer]) for peer in self._peers], chunks, what, channel
        )

    def _exchange(
        self,
        receives: list[tuple[int, torch.Tensor]],
        sends: list[tuple[int, torch.Tensor]],
        chunks: list[torch.Tensor],
        what: str,
        channel: int,
    ) -> Flight:
        tag = _FIRST_TAG + channel
        group = self.group

        def post() -> list[dist.Work]:
            # Receives first: a message that finds its buffer posted is not announced twice.
            works = [group.recv([buffer], peer, tag) for peer, buffer in receives]
            return works + [group.send([buffer], peer, tag) for peer, buffer in sends]

        return _Works(_checked(what, group, post), chunks, what, group)


def transport_for(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Chooses the transport of a group for tensors on `device`."""
    if group.size() == 1:
        return PairwiseTransport(group)
    backends = dict(item.split(":") for item in dist.get_backend_config(group).split(","))
    gloo = backends.get(device.type) == "gloo"
    return PairwiseTransport(group) if gloo else StreamTransport(group)
