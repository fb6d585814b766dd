"""A reduction under way: from packed chunks to the average in the gradient shard.

    reduce-scatter -> (second step, over the mesh's other dim) -> (all-reduce hook) -> gradient
    shard

Which of the steps there are is fixed by the group's mesh and settings, never by the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardgrad import ops
from shardgrad.engine.buffers import Chunks, Slot
from shardgrad.engine.comm_context import CollectiveConfig, CommContext, SecondStep
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.streams import Stream, StreamEvent, Streams
from shardgrad.engine.transports import MessageTag, Work
from shardgrad.errors import CollectiveError

__all__ = [
    "OVERFLOWING",
    "PartialSum",
    "PendingSum",
    "Reduction",
    "SecondStep",
]

# Sums of many ranks overflow in these, so they are divided before and after.
OVERFLOWING = (torch.float16,)

_NOTHING = torch.empty(0)
_NO_ROOM = Chunks(_NOTHING, 0)


@dataclass(eq=False)
class PendingSum:
    """What adds up to a chunk: ranges, each a first element, a length, and 1-D summands of that
    length.
    """

    _ranges: Sequence[tuple[int, int, Sequence[torch.Tensor]]]

    def plus(self, chunk: torch.Tensor, room: torch.Tensor) -> PendingSum:
        """Returns this and one more chunk; if dtypes differ, this is summed first, in `room`."""
        if self._ranges[0][2][0].dtype != chunk.dtype:
            self.write(room)
            return PendingSum([(0, room.numel(), [room, chunk])])
        more = ((at, n, [*summands, chunk.narrow(0, at, n)]) for at, n, summands in self._ranges)
        return PendingSum(list(more))

    def write(self, out: torch.Tensor, *, divisor: float = 1.0, accumulate: bool = False) -> None:
        """Computes the sum by `ops.sum_chunks`; `out`, a chunk, may be among the summands.

        Streams: on the current one. Capture: safe.
        """
        for begin, numel, summands in self._ranges:
            part = out if numel == out.numel() else out.narrow(0, begin, numel)
            ops.sum_chunks(summands, part, divisor=divisor, accumulate=accumulate)


class PartialSum:
    """What earlier micro-batches have left after the reduce-scatter, for the second step to take
    along.
    """

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None  # in the reduce dtype; None until the first time
        self.is_live = False

    @property
    def live(self) -> torch.Tensor | None:
        """What is to be added, if anything is."""
        return self.tensor if self.is_live else None

    def keep(self, pending: PendingSum, like: torch.Tensor) -> None:
        """Becomes a sum, in which it takes part itself if it is live."""
        if self.tensor is None:
            self.tensor = torch.empty_like(like)
        pending.write(self.tensor)
        self.is_live = True


@dataclass(eq=False, kw_only=True)
class Reduction:
    """A launched reduction: what it reads, where its result goes, and how to end it."""

    stream_ordered: bool  # as of its transport
    shard: GradShard | None  # None to stop after the first step and keep a partial sum
    touched: tuple[bool, ...]  # per trainable parameter, whether this rank had a gradient
    has_sums: bool  # it brings gradients of earlier backwards, too
    divisor: float  # of the sum, at the end
    partial: PartialSum
    second: SecondStep | None
    tag: MessageTag
    collectives: CollectiveConfig  # whose hook is called with the result
    comm_ctx: CommContext
    reader: Stream  # of what a program keeps
    end: Stream  # that it ends on
    done: StreamEvent  # of the group; recorded at the end
    # What writes the gradient shard, if nothing is sent. Else there are messages, each behind the
    # first element and length of what it brings, in a slot, which is released at the end.
    write: Callable[..., object] | None = None
    works: Sequence[tuple[int, int, Work]] = ()
    slot: Slot | None = None
    own: torch.Tensor = _NOTHING  # room for the first step's sum; it may be among what is summed
    room: Chunks = _NO_ROOM  # of the second step
    staging: torch.Tensor | None = None  # of a gradient shard on the host
    is_complete: bool = False
    _has_started_second: bool = False
    _pending: PendingSum | None = None

    def start_second_step(self) -> None:
        """Ends the reduce-scatter and starts a second step; the host waits only without stream
        order.
        """
        if self._has_started_second:
            return
        # The next launch, the end of backward and whoever waits may all come to it.
        self._has_started_second = True
        if self.write is not None:
            return
        # Chunks are not added up before someone needs the sum in memory: with one step, the kernel
        # that writes gradients reads them.
        pending = self._pending = self._received()
        if self.second is None:
            return
        if self.partial.live is not None:
            pending = pending.plus(self.partial.live, self.own)
        if self.shard is None:
            self.partial.keep(pending, like=self.own)
            self.works = []
            return
        # The second step sends what the first has left, so that is added up now, on this stream.
        pending.write(self.own)
        self.partial.is_live = False
        result = self.second.result(self.own)
        work = self.second.launch(self.own, self.room, self.tag, self.comm_ctx)
        self.works, self._pending = [(0, result.numel(), work)], None

    def _received(self) -> PendingSum:
        return PendingSum([(begin, numel, work.wait()) for begin, numel, work in self.works])

    def complete(self) -> None:
        """Ends the reduction: the gradients are bound, and its slot is free once the device gets
        there.
        """
        if self.is_complete:
            return
        self.start_second_step()
        if self.shard is not None:
            self._write(self.shard, self.comm_ctx.streams)
        self._finish()

    def _write(self, shard: GradShard, streams: Streams) -> None:
        """Writes the average into the gradient shard and binds it."""
        write, divisor = self.write, self.divisor
        if write is None:
            pending = self._pending or self._received()
            if self.collectives.hook is not None:
                pending, divisor = self._through_hook(pending, shard.numel, streams)
            write = pending.write
        shard.reduce_into(write, divisor, self.staging, streams, self.reader)
        shard.bind(self.touched, streams)

    def _through_hook(
        self, pending: PendingSum, numel: int, streams: Streams
    ) -> tuple[PendingSum, float]:
        """Shows the result to the program's hook; returns the sum to go on with, and its
        divisor.
        """
        out = self.own if self.second is None else self.second.result(self.own)
        # The hook sees the average, unless the program wants the sum, or a sum of many ranks would
        # overflow without the division that comes last.
        is_sum = self.collectives.only_sums or out.dtype in OVERFLOWING
        now, later = (1.0, self.divisor) if is_sum else (self.divisor, 1.0)
        pending.write(out, divisor=now)
        current = streams.current()
        place = self.collectives.hook_stream or current
        self.done.record(current)
        self.done.wait(place)
        with streams.on(place), torch.no_grad():
            self.collectives.hook(out.narrow(0, 0, numel))
        self.done.record(place)
        self.done.wait(current)
        return PendingSum([(0, out.numel(), [out])]), later

    def join(self, stream: Stream) -> None:
        """Completes, and makes `stream` wait for the gradients, or the host if they come to it."""
        self.complete()
        self.done.wait(stream)
        if self.shard is not None:
            self.shard.read.clear()
            # Last, because the host waits there for flags from the device, with everything
            # launched.
            self.shard.decide()

    def abandon(self) -> bool:
        """Ends and drops a reduction of a failed backward; returns if gradients or sums are lost
        with it.
        """
        # What it has added to gradients or to a partial sum cannot be taken out again.
        is_written = self.is_complete or self._has_started_second
        if is_written:
            self.partial.is_live = False
        if self.is_complete:
            if self.shard is not None:
                self.shard.unbind()
            return is_written or self.has_sums
        # The collective is waited for even so: it reads and writes the slot until it ends.
        try:
            for _, _, work in self.works:
                work.wait()
        except BaseException as error:
            if self.slot is not None:
                # It may still end, and write to the slot, whose memory is therefore not lent again.
                self.slot.give_back(is_written=True)
            if not isinstance(error, CollectiveError):  # the next one of the group fails as well
                raise
        finally:
            self._finish()
        return is_written or self.has_sums

    def _finish(self) -> None:
        self.is_complete = True
        # They may hold gradients that were sent from where they are.
        self.works, self._pending = (), None
        if self.slot is not None:
            self.slot.release(self.end)
        self.done.record(self.end)
