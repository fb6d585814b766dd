"""A reduction of gradients, from packed chunks to the average in the gradient shard.

    reduce-scatter -> (second step, over the mesh's other dim) -> (all-reduce hook) -> gradient
    shard

The group's mesh and settings decide which of these steps run, never the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardgrad import ops
from shardgrad.engine.buffers import Chunks, PieceSize, Slot, SlotRing
from shardgrad.engine.comm_context import CollectiveConfig, CommContext, SecondStep
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param import FSDPParam
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.streams import Stream, StreamEvent, Streams
from shardgrad.engine.transports import MessageTag, Transport, Work
from shardgrad.errors import CollectiveError
from shardgrad.sharding.layout import ShardLayout

__all__ = [
    "PartialSum",
    "PendingSum",
    "ReduceRoute",
    "Reduction",
    "reduce_route",
]

# Sums over many ranks overflow in these dtypes, so divide before and after the reduction.
_OVERFLOWING = (torch.float16,)

_NOTHING = torch.empty(0)
_NO_ROOM = Chunks(_NOTHING, 0)


@dataclass(frozen=True, eq=False)
class ReduceRoute:
    """How a group's gradients are reduced; valid until one of the inputs of `reduce_route` changes.

    Attributes:
        comm_ctx: of the root.
        transport: of the reduce-scatter.
        ring: the slots of messages.
        second: the step after the reduce-scatter on a mesh with another dim to reduce over.
        collectives: its hook is called with the result.
        before, after: divisors of the gradients before and after the reduction.
        end: the stream on which reductions end. With a second step it is not the reduce stream, so
            that the next reduce-scatter need not wait.
        done: recorded at the end of each reduction.
        is_local: nothing is sent: the pack writes the gradient shard at the end.
        messages: per message, the first element and the length of its part of the chunk, and its
            tag. All after the first are gradients that are sent without a copy.
        sizes: the pieces of one slot, in this order, so that each step uses the same addresses:
            what is sent, the sum of the first step, room for the second step, staging of a gradient
            shard on the host, and what each message receives.
    """

    comm_ctx: CommContext
    transport: Transport
    ring: SlotRing
    second: SecondStep | None
    collectives: CollectiveConfig
    before: float
    after: float
    end: Stream
    done: StreamEvent
    is_local: bool
    messages: list[tuple[int, int, MessageTag]]
    sizes: list[PieceSize]


def reduce_route(
    group: ParamGroup,
    params: Sequence[FSDPParam],
    layout: ShardLayout,
    second: SecondStep | None,
    divide_factor: float | None,
    comm_ctx: CommContext,
) -> ReduceRoute:
    """Computes how the gradients of `params`, some of a group's parameters, are reduced."""
    streams, room = comm_ctx.streams, (0, 0)
    transport, ring = group.collectives.for_reduce(comm_ctx, group.mesh.gather_group)
    if second is not None:
        room = second.room(comm_ctx, layout.chunk_numel)
    before, after = _divisors(
        divide_factor or float(group.mesh.data_parallel_size), group.reduce_dtype
    )
    # Without division, hook or custom collective, gradients can be sent without a copy.
    reads = before == 1 and group.collectives.reduces_plainly
    sums, read = group.reduce_dtype, group.gather_dtype
    wire = sums if not transport.sends else group.gradient_policy.wire_dtype or sums
    # If nothing is sent, the pack may write the gradient shard directly, provided that a message or
    # a step in between would not round or change the values.
    is_exact = sums == torch.promote_types(sums, read) and sums in (read, group.gradient_dtype)
    ends_here = second is group.collectives.hook is None
    is_offloaded = group.shard_memory.is_offloaded
    is_local = reads and is_exact and ends_here and not (transport.sends or is_offloaded)
    # On a mesh of two dims, the first step leaves the part that ranks of the other dim share.
    ranks = transport.size
    chunk_numel = layout.chunk_numel * group.mesh.shard_size // ranks
    # Zero-copy gradients are sent as separate messages, which make up the beginning of the chunk.
    is_whole = reads and not is_local and wire == read and bool(layout.zero_copy)
    skipped = layout.packed_offset if is_whole else 0
    messages = [(skipped, chunk_numel - skipped, group.reduce_tag)]
    for i in layout.zero_copy if is_whole else ():
        piece, tag = layout.pieces[i], MessageTag(f"reduce-scatter of {params[i].name}")
        messages.append((piece.shard_offset, piece.shard_numel, tag))
    # Gradients may be sent in a narrower dtype than their sum, which then needs its own memory.
    has_own = is_whole or (wire != sums and not ends_here)
    return ReduceRoute(
        comm_ctx,
        transport,
        ring,
        second,
        group.collectives,
        before,
        after,
        end=streams.reduce if second is None else streams.second,
        done=streams.event(),
        is_local=is_local,
        messages=messages,
        sizes=[
            (wire, ranks, chunk_numel - skipped),
            (sums, int(has_own), chunk_numel),
            (sums, *room),
            (group.gradient_dtype, int(is_offloaded), layout.chunk_numel),
            *((wire, transport.receive_chunks, numel) for _, numel, _ in messages),
        ],
    )


def _divisors(factor: float, reduce_dtype: torch.dtype) -> tuple[float, float]:
    """Returns the divisors of gradients before and after the reduction.

    fp16 splits the factor near its square root, into powers of two as FSDP2 does. fp32 and bf16
    divide once, after the reduction, which leaves the fewest elements to divide.
    """
    if reduce_dtype not in _OVERFLOWING:
        return 1.0, factor
    # The sum would overflow without a division before it; dividing fully before it would underflow.
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return before, factor / before


@dataclass(eq=False)
class PendingSum:
    """A deferred sum of a chunk: per range, its first element, its length, and tensors to add
    (1-D).
    """

    _ranges: Sequence[tuple[int, int, Sequence[torch.Tensor]]]

    def plus(self, chunk: torch.Tensor, room: torch.Tensor) -> PendingSum:
        """Returns the sum with one more chunk. If dtypes differ, first computes this sum
        in `room`.
        """
        if self._ranges[0][2][0].dtype != chunk.dtype:
            self.write(room)
            return PendingSum([(0, room.numel(), [room, chunk])])
        more = ((at, n, [*summands, chunk.narrow(0, at, n)]) for at, n, summands in self._ranges)
        return PendingSum(list(more))

    def write(self, out: torch.Tensor, *, divisor: float = 1.0, accumulate: bool = False) -> None:
        """Computes the sum with `ops.sum_chunks`. `out`, a chunk, may be one of the summands.

        Streams: on the current one. Capture: safe.
        """
        for begin, numel, summands in self._ranges:
            part = out if numel == out.numel() else out.narrow(0, begin, numel)
            ops.sum_chunks(summands, part, divisor=divisor, accumulate=accumulate)


class PartialSum:
    """Reduce-scattered gradients of earlier micro-batches that wait for a second step."""

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None  # in the reduce dtype; None before first use
        self.is_live = False

    @property
    def live(self) -> torch.Tensor | None:
        """The tensor to add to the next reduction, or None."""
        return self.tensor if self.is_live else None

    def keep(self, pending: PendingSum, like: torch.Tensor) -> None:
        """Stores the value of `pending`, of which this may itself be a summand."""
        if self.tensor is None:
            self.tensor = torch.empty_like(like)
        pending.write(self.tensor)
        self.is_live = True


@dataclass(eq=False, kw_only=True)
class Reduction:
    """A launched reduction: its inputs, its destination, and how to end it."""

    route: ReduceRoute
    shard: GradShard | None  # None to stop after the first step and keep a partial sum
    touched: tuple[bool, ...]  # per trainable parameter, whether this rank had a gradient
    has_sums: bool  # it includes gradients of earlier backwards
    partial: PartialSum
    reader: Stream  # on which the program reads kept gradients
    pack_stream: Stream
    end: Stream  # on which it ends
    # If nothing is sent, `write` fills the gradient shard. Otherwise each of `works` has the first
    # element and the length of its part, and its data is in `slot`, which is released at the end.
    write: Callable[..., object] | None = None
    works: Sequence[tuple[int, int, Work]] = ()
    slot: Slot | None = None
    own: torch.Tensor = _NOTHING  # for the first step's sum; may be one of its summands
    room: Chunks = _NO_ROOM  # for the second step
    staging: torch.Tensor | None = None  # for a gradient shard on the host
    is_complete: bool = False
    _has_started_second: bool = False
    _pending: PendingSum | None = None

    def start_second_step(self) -> None:
        """Ends the reduce-scatter and starts a second step.

        Blocks the host only if streams do not order the transport's results.
        """
        if self._has_started_second:
            return
        # The next launch, the end of backward and `join` may all call this.
        self._has_started_second = True
        if self.write is not None:
            return
        # Add up chunks only when the sum is needed in memory. With a single step, the kernel that
        # writes the gradients reads the chunks.
        pending = self._pending = self._received()
        route, second = self.route, self.route.second
        if second is None:
            return
        if self.partial.live is not None:
            pending = pending.plus(self.partial.live, self.own)
        if self.shard is None:
            self.partial.keep(pending, like=self.own)
            self.works = []
            return
        # The second step sends the first step's sum, so compute it now, on this stream.
        pending.write(self.own)
        self.partial.is_live = False
        result = second.result(self.own)
        work = second.launch(self.own, self.room, route.messages[0][2], route.comm_ctx)
        self.works, self._pending = [(0, result.numel(), work)], None

    def _received(self) -> PendingSum:
        return PendingSum([(begin, numel, work.wait()) for begin, numel, work in self.works])

    def complete(self) -> None:
        """Ends the reduction: binds the gradients, and releases the slot in stream order."""
        if self.is_complete:
            return
        if not self._has_started_second:
            self.start_second_step()
        if self.shard is not None:
            self._write(self.shard, self.route.comm_ctx.streams)
        self._finish()

    def _write(self, shard: GradShard, streams: Streams) -> None:
        """Writes the average into the gradient shard and binds the gradients."""
        write, divisor = self.write, self.route.after
        if write is None:
            pending = self._pending or self._received()
            if self.route.collectives.hook is not None:
                pending, divisor = self._through_hook(pending, shard.numel, streams)
            write = pending.write
        # Allocate on the pack stream, which is backward's: the allocator caches memory per stream,
        # so gradients reuse the memory of freed activations.
        shard.look(is_captured=self.route.comm_ctx.is_captured)
        shard.reduce_into(write, divisor, self.staging, streams, self.reader, self.pack_stream)
        shard.bind(self.touched, streams)

    def _through_hook(
        self, pending: PendingSum, numel: int, streams: Streams
    ) -> tuple[PendingSum, float]:
        """Calls the program's hook with the result; returns the new sum and its remaining
        divisor.
        """
        route = self.route
        out = self.own if route.second is None else route.second.result(self.own)
        # The hook sees the average. It sees the sum if the program asks for it, or if the dtype
        # needs the division to be split.
        is_sum = route.collectives.only_sums or out.dtype in _OVERFLOWING
        now, later = (1.0, route.after) if is_sum else (route.after, 1.0)
        pending.write(out, divisor=now)
        current = streams.current()
        place = route.collectives.hook_stream or current
        route.done.record(current)
        route.done.wait(place)
        with streams.on(place), torch.no_grad():
            route.collectives.hook(out.narrow(0, 0, numel))
        route.done.record(place)
        route.done.wait(current)
        return PendingSum([(0, out.numel(), [out])]), later

    def join(self, stream: Stream) -> None:
        """Completes the reduction and makes `stream` wait for it, or the host for gradients on the
        host.
        """
        self.complete()
        self.route.done.wait(stream)
        if self.shard is not None:
            self.shard.read.clear()
            # Last, because the host waits here for flags from the device; everything is launched.
            self.shard.decide()

    def abandon(self) -> bool:
        """Ends and drops a reduction of a failed backward; returns whether gradients or sums are
        lost.
        """
        # It cannot be subtracted from gradients or a partial sum that it was added to.
        is_written = self._has_started_second
        if is_written:
            self.partial.is_live = False
        if self.is_complete:
            if self.shard is not None:
                self.shard.unbind()
            return is_written or self.has_sums
        # Wait for the collective anyway, because it reads and writes the slot until it ends.
        try:
            for _, _, work in self.works:
                work.wait()
        except BaseException as error:
            if self.slot is not None:
                # The collective may still write to the slot, so its memory must not be reused.
                self.slot.give_back(is_written=True)
            if not isinstance(error, CollectiveError):  # others of the group fail as well
                raise
        finally:
            self._finish()
        return is_written or self.has_sums

    def _finish(self) -> None:
        self.is_complete = True
        # They may reference gradients that were sent without a copy.
        self.works, self._pending = (), None
        if self.slot is not None:
            self.slot.release(self.end)
        self.route.done.record(self.end)
