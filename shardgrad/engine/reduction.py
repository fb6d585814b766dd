"""A reduction under way: from packed chunks to the average in the gradient shard.

    reduce-scatter -> (second step, over the mesh's other dim) -> (all-reduce hook) -> gradient shard

Which of the steps there are is fixed by the group's mesh and settings, never by the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Chunks, Slot
from shardgrad.engine.comm_context import CommContext, SecondStep
from shardgrad.engine.grad_shard import GradShard, PendingSum
from shardgrad.engine.streams import Stream, Streams
from shardgrad.engine.transports import MessageTag, Work

__all__ = ["AllReduceHook", "PartialSum", "Reduction", "ReplicaAllReduce", "SecondStep"]


class PartialSum:
    """What earlier micro-batches have left after the reduce-scatter, for the second step to take along.

    Attributes:
        tensor: in the reduce dtype; None until the first time.
        is_live: False if it stands for nothing.
    """

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None
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


class ReplicaAllReduce:
    """HSDP's second step: an all-reduce over the replicas."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        self._replicas = replicas

    def room(self, comm_ctx: CommContext) -> int:
        """See `SecondStep`: it works in place."""
        return 0

    def arrange(
        self, rows: list[torch.Tensor], table: torch.Tensor, chunk_numel: int
    ) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """See `SecondStep`: the order stays."""
        return rows, table, chunk_numel

    def launch(self, summed: torch.Tensor, room: Chunks, tag: MessageTag, comm_ctx: CommContext) -> Work:
        """See `SecondStep`."""
        what = tag.what.replace("reduce-scatter", "all-reduce")
        return comm_ctx.transport(self._replicas).all_reduce(summed, what=what)

    def result(self, summed: torch.Tensor) -> torch.Tensor:
        """See `SecondStep`: all of it."""
        return summed


@dataclass(frozen=True)
class AllReduceHook:
    """A program's hook on reduced gradients.

    Attributes:
        call: gets the chunk, without what the engine has put behind the gradients.
        stream: where it is called; None for where reductions run.
        is_before_division: it sees the sum and not the average.
    """

    call: Callable[[torch.Tensor], Any]
    stream: Stream
    is_before_division: bool


class Reduction:
    """A launched reduction: what it reads, where its result goes, and how to end it.

    Args:
        works: of the reduce-scatter's messages, each behind the first element and the number of elements
            that it brings of a chunk.
        slots: what is in flight lies in; released at the end.
        own: this rank's chunk of the first step, and room for its sum.
        shard: where the average goes; None to stop after the first step and keep a partial sum.
        staging: room for the average, if the shard does not live on the mesh's device; else None.
        touched: per trainable parameter, whether this rank had a gradient.
        divisor: what the sum is divided by at the end.
        partial: of the group.
        second: the second step, or None.
        room: what it receives goes there.
        tag: of the group's reductions.
        hook: the program's, or None.
        comm_ctx: of the root.
    """

    def __init__(
        self,
        works: Sequence[tuple[int, int, Work]],
        slots: Sequence[Slot],
        own: torch.Tensor,
        shard: GradShard | None,
        staging: torch.Tensor | None,
        touched: tuple[bool, ...],
        divisor: float,
        *,
        partial: PartialSum,
        second: SecondStep | None,
        room: Chunks,
        tag: MessageTag,
        hook: AllReduceHook | None,
        comm_ctx: CommContext,
    ) -> None:
        self._works: Sequence[tuple[int, int, Work]] = works
        self._slots = slots
        self._own = own
        self._shard = shard
        self._staging = staging
        self._touched = touched
        self._divisor = divisor
        self._partial = partial
        self._second = second
        self._room = room
        self._tag = tag
        self._hook = hook
        self._context = comm_ctx
        self._done = comm_ctx.streams.event()
        self._pending: PendingSum | None = None
        self._has_started_second = False
        self.is_complete = False

    def start_second_step(self) -> None:
        """Ends the reduce-scatter and starts the second step, if there is one.

        The host waits only if the transport is not stream-ordered.
        """
        if self._has_started_second:
            return
        self._has_started_second = True
        pending = PendingSum([(begin, numel, work.wait()) for begin, numel, work in self._works])
        if self._second is None:
            self._pending = pending
            return
        if self._partial.live is not None:
            pending = pending.plus(self._partial.live)
        if self._shard is None:
            self._partial.keep(pending, like=self._own)
            self._works = []
            return
        pending.write(self._own)
        self._partial.is_live = False
        result = self._second.result(self._own)
        work = self._second.launch(self._own, self._room, self._tag, self._context)
        self._works = [(0, result.numel(), work)]

    def complete(self) -> None:
        """Ends the reduction: the gradients are bound, and its slots are free once the device gets there."""
        if self.is_complete:
            return
        streams = self._context.streams
        with torch.no_grad():
            self.start_second_step()
            shard, pending, divisor = self._shard, self._pending, self._divisor
            if shard is not None:
                if pending is None:
                    ranges = [(begin, numel, work.wait()) for begin, numel, work in self._works]
                    pending = PendingSum(ranges)
                if self._hook is not None:
                    numel = shard.values.numel()
                    pending, divisor = self._through_hook(self._hook, pending, numel, streams)
                shard.reduce_into(pending, divisor, self._touched, self._staging, streams)
        self._end(streams)

    def _through_hook(
        self, hook: AllReduceHook, pending: PendingSum, numel: int, streams: Streams
    ) -> tuple[PendingSum, float]:
        """Shows the result to the program's all-reduce hook, as FSDP2 does.

        Returns:
            The sum to go on with, and what it is still to be divided by.
        """
        out = self._own if self._second is None else self._second.result(self._own)
        pending.write(out, divisor=1.0 if hook.is_before_division else self._divisor)
        current = streams.current()
        place = hook.stream or current
        self._done.record(current)
        self._done.wait(place)
        with streams.on(place):
            hook.call(out.narrow(0, 0, numel))
        self._done.record(place)
        self._done.wait(current)
        return PendingSum([(0, out.numel(), [out])]), self._divisor if hook.is_before_division else 1.0

    def join(self, stream: Stream) -> None:
        """Completes, and makes `stream` wait for the gradients, or the host if they come to it."""
        self.complete()
        self._done.wait(stream)
        if self._staging is not None and self._shard is not None:
            self._shard.wait_on_host()

    def abandon(self) -> bool:
        """Takes back a reduction of a backward that failed.

        What is in flight is waited for and dropped; gradients and sums that it has been added to are lost
        along with it.

        Returns:
            Whether it has been added to any.
        """
        is_written = self.is_complete or self._has_started_second
        if is_written:
            self._partial.is_live = False
        if self.is_complete:
            if self._shard is not None:
                self._shard.unbind()
            return is_written
        try:
            for _, _, work in self._works:
                work.wait()
        finally:
            self._end(self._context.streams)
        return is_written

    def _end(self, streams: Streams) -> None:
        self.is_complete = True
        for slot in self._slots:
            slot.release(streams.reduce)
        self._done.record(streams.reduce)
