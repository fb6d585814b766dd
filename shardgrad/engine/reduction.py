"""How a group's gradients travel, and a reduction under way: from packed chunks to the average in
the gradient shard.

    reduce-scatter -> (second step, over the mesh's other dim) -> (all-reduce hook) -> gradient
    shard

Which of the steps there are is fixed by the group's mesh and settings, never by the data.
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

# Sums of many ranks overflow in these, so they are divided before and after.
_OVERFLOWING = (torch.float16,)

_NOTHING = torch.empty(0)
_NO_ROOM = Chunks(_NOTHING, 0)


@dataclass(frozen=True, eq=False)
class ReduceRoute:
    """How a group's gradients travel, as long as nothing is changed about that.

    Attributes:
        comm_ctx: of the root.
        transport: of the reduce-scatter.
        ring: of the slots that are sent.
        second: what follows on a mesh with another dim to reduce over.
        collectives: whose hook is called with the result.
        before, after: what gradients are divided by before the reduction, and after it.
        end: the stream that reductions end on: the next reduce-scatter does not wait for a second
            step.
        done: recorded at the end of each reduction.
        is_local: nothing is sent: the end packs into the gradient shard.
        messages: of each, the beginning and the length of what it brings, and its tag. All after
            the first are gradients that are sent from where they are.
        sizes: all memory lies in one slot, in this order, so that a step uses the same addresses
            again: what is sent, the sum of the first step, room for the second, what becomes the
            gradient shard on the host, and what each message receives.
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
    """Works out how the gradients of some of a group's parameters, with a layout, travel."""
    streams, room = comm_ctx.streams, (0, 0)
    transport, ring = group.collectives.for_reduce(comm_ctx, group.mesh.gather_group)
    if second is not None:
        room = second.room(comm_ctx, layout.chunk_numel)
    before, after = _divisors(
        divide_factor or float(group.mesh.data_parallel_size), group.reduce_dtype
    )
    # Gradients that autograd made can be read as they are, without a message of our own.
    reads = before == 1 and group.collectives.reduces_plainly
    sums, read = group.reduce_dtype, group.gather_dtype
    wire = sums if not transport.sends else group.gradient_policy.wire_dtype or sums
    # With nothing to send, the pack may write the gradient shard, if no message and no step in
    # between would round what it reads, or change it.
    is_exact = sums == torch.promote_types(sums, read) and sums in (read, group.gradient_dtype)
    ends_here = second is group.collectives.hook is None
    is_offloaded = group.shard_memory.is_offloaded
    is_local = reads and is_exact and ends_here and not (transport.sends or is_offloaded)
    # On a mesh of two dims the first step leaves what the ranks of the other dim hold together.
    ranks = transport.size
    chunk_numel = layout.chunk_numel * group.mesh.shard_size // ranks
    # Zero-copy gradients are messages of their own, which bring the beginning of the chunk.
    is_whole = reads and not is_local and wire == read and bool(layout.zero_copy)
    skipped = layout.packed_offset if is_whole else 0
    messages = [(skipped, chunk_numel - skipped, group.reduce_tag)]
    for i in layout.zero_copy if is_whole else ():
        piece, tag = layout.pieces[i], MessageTag(f"reduce-scatter of {params[i].name}")
        messages.append((piece.shard_offset, piece.shard_numel, tag))
    # On the wire gradients may be narrower than their sum; then the sum needs other memory.
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
    """Returns what gradients are divided by before the reduction, and after it.

    fp16 splits the factor around its square root, into powers of two as FSDP2 does; fp32 and bf16
    divide once, where there is least to divide.
    """
    if reduce_dtype not in _OVERFLOWING:
        return 1.0, factor
    # Half of the division comes before the sum, which would overflow, and half after it, since
    # what is divided too early underflows.
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return before, factor / before


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

    route: ReduceRoute
    shard: GradShard | None  # None to stop after the first step and keep a partial sum
    touched: tuple[bool, ...]  # per trainable parameter, whether this rank had a gradient
    has_sums: bool  # it brings gradients of earlier backwards, too
    partial: PartialSum
    reader: Stream  # of what a program keeps
    pack_stream: Stream
    end: Stream  # that it ends on
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
        route, second = self.route, self.route.second
        if second is None:
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
        result = second.result(self.own)
        work = second.launch(self.own, self.room, route.messages[0][2], route.comm_ctx)
        self.works, self._pending = [(0, result.numel(), work)], None

    def _received(self) -> PendingSum:
        return PendingSum([(begin, numel, work.wait()) for begin, numel, work in self.works])

    def complete(self) -> None:
        """Ends the reduction: the gradients are bound, and its slot is free once the device gets
        there.
        """
        if self.is_complete:
            return
        if not self._has_started_second:
            self.start_second_step()
        if self.shard is not None:
            self._write(self.shard, self.route.comm_ctx.streams)
        self._finish()

    def _write(self, shard: GradShard, streams: Streams) -> None:
        """Writes the average into the gradient shard and binds it."""
        write, divisor = self.write, self.route.after
        if write is None:
            pending = self._pending or self._received()
            if self.route.collectives.hook is not None:
                pending, divisor = self._through_hook(pending, shard.numel, streams)
            write = pending.write
        # The pack stream is that of backward: freed activations, which the allocator keeps for each
        # stream, become gradients without more memory.
        shard.look(is_captured=self.route.comm_ctx.is_captured)
        shard.reduce_into(write, divisor, self.staging, streams, self.reader, self.pack_stream)
        shard.bind(self.touched, streams)

    def _through_hook(
        self, pending: PendingSum, numel: int, streams: Streams
    ) -> tuple[PendingSum, float]:
        """Shows the result to the program's hook; returns the sum to go on with, and its
        divisor.
        """
        route = self.route
        out = self.own if route.second is None else route.second.result(self.own)
        # The hook sees the average, unless the program wants the sum, or a sum of many ranks would
        # overflow without the division that comes last.
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
        """Completes, and makes `stream` wait for the gradients, or the host if they come to it."""
        self.complete()
        self.route.done.wait(stream)
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
        is_written = self._has_started_second
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
        self.route.done.record(self.end)
