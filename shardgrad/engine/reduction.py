"""A reduction of gradients, from packed chunks to the average in the gradient shard.

    reduce-scatter -> (second step, over the mesh's other axis) -> (all-reduce hook) -> gradient
    shard

The group's mesh and settings decide which of these steps run, never the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shardgrad import ops
from shardgrad.engine.buffers import Chunks, Slot
from shardgrad.engine.comm_context import CommContext, SecondStep
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param_group import FSDPParam, ParamGroup
from shardgrad.engine.streams import Stream
from shardgrad.engine.transports import MessageTag, Work
from shardgrad.errors import CollectiveError
from shardgrad.sharding.layout import ShardLayout

_NOTHING = torch.empty(0)
_NO_ROOM = Chunks(_NOTHING, 0)


class ReduceRoute:
    """How gradients of `params`, some of a group's, are reduced; valid until an argument changes.

    Attributes:
        comm_ctx: of the root.
        group: whose gradients these are.
        transport: of the reduce-scatter.
        ring: the slots of messages.
        second: the step after the reduce-scatter on a mesh with another axis to reduce over.
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

    def __init__(
        self,
        group: ParamGroup,
        params: Sequence[FSDPParam],
        layout: ShardLayout,
        divide_factor: float | None,
        comm_ctx: CommContext,
    ) -> None:
        self.comm_ctx, self.group = comm_ctx, group
        self.second = second = group.spec.second_step
        self.collectives = group.collectives
        transport, ring = self.collectives.for_reduce(comm_ctx, group.mesh.gather_group)
        self.transport, self.ring = transport, ring
        streams, room = comm_ctx.streams, (0, 0)
        if second is not None:
            room = second.room(comm_ctx, layout.chunk_numel)
        self.end = streams.reduce if second is None else streams.second
        self.done = streams.event()
        sums, read = group.reduce_dtype, group.gather_dtype
        self.before, self.after = _divisors(
            divide_factor or float(group.mesh.data_parallel_size), sums
        )
        # Without division, hook or custom collective, gradients can be sent without a copy.
        reads = self.before == 1 and ring is comm_ctx.reduce_ring
        wire = sums if not transport.sends else group.gradient_policy.wire_dtype or sums
        # If nothing is sent, the pack may write the gradient shard directly, provided that a
        # message or a step in between would not round or change the values.
        is_exact = sums == torch.promote_types(sums, read) and sums in (read, group.gradient_dtype)
        ends_here = second is self.collectives.hook is None
        is_offloaded = group.shard_memory.is_offloaded
        self.is_local = reads and is_exact and ends_here and not (transport.sends or is_offloaded)
        # On a mesh of two axes, the first step leaves the part that ranks of the other axis share.
        ranks = transport.size
        chunk_numel = layout.chunk_numel * group.mesh.shard_size // ranks
        # Zero-copy gradients are sent as separate messages, which make up the beginning of the
        # chunk.
        is_whole = reads and not self.is_local and wire == read and bool(layout.zero_copy)
        skipped = layout.packed_offset if is_whole else 0
        self.messages = [(skipped, chunk_numel - skipped, group.reduce_tag)]
        for i in layout.zero_copy if is_whole else ():
            piece, tag = layout.pieces[i], MessageTag(f"reduce-scatter of {params[i].name}")
            self.messages.append((piece.shard_offset, piece.shard_numel, tag))
        # Gradients may be sent in a narrower dtype than their sum, which then needs its own memory.
        has_own = is_whole or (wire != sums and not ends_here)
        self.sizes = [
            (wire, ranks, chunk_numel - skipped),
            (sums, int(has_own), chunk_numel),
            (sums, *room),
            (group.gradient_dtype, int(is_offloaded), layout.chunk_numel),
            *((wire, transport.receive_chunks, numel) for _, numel, _ in self.messages),
        ]


def _divisors(factor: float, reduce_dtype: torch.dtype) -> tuple[float, float]:
    """Returns the divisors of gradients before and after the reduction.

    fp16 splits the factor near its square root, into powers of two as FSDP2 does. fp32 and bf16
    divide once, after the reduction, which leaves the fewest elements to divide.
    """
    if reduce_dtype != torch.float16:
        return 1.0, factor
    # The sum would overflow without a division before it; dividing fully before it would underflow.
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return before, factor / before


@dataclass(eq=False)
class PartialSum:
    """Reduce-scattered gradients of earlier micro-batches that wait for a second step.

    Attributes:
        tensor: in the reduce dtype; empty before the first use.
        is_live: gradients wait in it.
    """

    tensor: torch.Tensor = _NOTHING
    is_live: bool = False


@dataclass(eq=False, kw_only=True)
class Reduction:
    """A launched reduction: its inputs, its destination, and how to end it."""

    route: ReduceRoute
    shard: GradShard | None  # None to stop after the first step and keep a partial sum
    touched: tuple[bool, ...]  # per trainable parameter, whether this rank had a gradient
    has_sums: bool  # it includes gradients of earlier backwards
    second: SecondStep | None  # the second step, until it is started
    partial: PartialSum
    reader: Stream  # on which the program reads kept gradients
    pack_stream: Stream
    end: Stream  # on which it ends
    # If nothing is sent, `write` fills the gradient shard. Otherwise each of `works` has the first
    # element and the length of its part, and its data is in `slot`, which is released at the end.
    write: Callable[..., object] | None = None
    works: list[tuple[int, int, Work]] = field(default_factory=list)
    slot: Slot | None = None
    own: torch.Tensor = _NOTHING  # for the first step's sum; may be one of its summands
    room: Chunks = _NO_ROOM  # for the second step
    staging: torch.Tensor | None = None  # for a gradient shard on the host
    is_complete: bool = False

    @property
    def is_bound(self) -> bool:
        """True if its gradients were bound when it was launched: the host need not wait for them,
        nor for what other ranks have touched.
        """
        is_decided = self.shard is None or self.shard.is_decided
        return self.route.transport.stream_ordered and is_decided

    def start_second_step(self) -> None:
        """Ends the first of two steps and starts the second, if that is still to be done.

        Blocks the host only if streams do not order the transport's results.
        """
        route, partial = self.route, self.partial
        second, self.second = self.second, None
        if second is None:
            return
        if self.shard is None or partial.is_live:
            if not partial.tensor.numel():
                partial.tensor = torch.empty_like(self.own)
            self._sum(partial.tensor, accumulate=partial.is_live)
            partial.is_live, self.works = self.shard is None, []
            if self.shard is None:
                return
            self.own.copy_(partial.tensor)
        else:
            self._sum(self.own)
        numel = second.result(self.own).numel()
        work = second.launch(self.own, self.room, route.group.reduce_tag, route.comm_ctx)
        self.works = [(0, numel, work)]

    def _sum(self, out: torch.Tensor, *, divisor: float = 1.0, accumulate: bool = False) -> None:
        """Waits for the collectives and adds up what they bring into `out`, a chunk.

        `out` may be one of the summands.

        Streams: on the current one. Capture: safe.
        """
        received = []
        for begin, numel, work in self.works:
            received.append((begin, numel, work.wait()))
        for begin, numel, summands in received:
            part = out if numel == out.numel() else out.narrow(0, begin, numel)
            ops.sum_chunks(summands, part, divisor=divisor, accumulate=accumulate)

    def complete(self) -> None:
        """Ends the reduction: writes the average into the gradient shard, binds the gradients, and
        releases the slot in stream order.
        """
        if self.is_complete:
            return
        if self.second is not None:
            self.start_second_step()
        shard, route = self.shard, self.route
        if shard is not None:
            write, divisor, comm_ctx = self.write or self._sum, route.after, route.comm_ctx
            if route.collectives.hook is not None:
                divisor = self._through_hook(shard.layout.tail_offset)
            # Allocate on the pack stream, which is backward's: the allocator caches memory per
            # stream, so gradients reuse the memory of freed activations.
            shard.look(is_captured=comm_ctx.is_captured)
            shard.reduce_into(
                write, divisor, self.staging, comm_ctx.streams, self.reader, self.pack_stream
            )
            shard.bind(self.touched, comm_ctx.streams)
        self._finish()

    def _through_hook(self, numel: int) -> float:
        """Calls the program's hook with the result, which remains to be written; returns the
        remaining divisor.
        """
        route, streams = self.route, self.route.comm_ctx.streams
        out = self.own if route.second is None else route.second.result(self.own)
        # The hook sees the average. It sees the sum if the program asks for it, or if the dtype
        # needs the division to be split.
        is_sum = route.collectives.only_sums or out.dtype == torch.float16
        now, later = (1.0, route.after) if is_sum else (route.after, 1.0)
        self._sum(out, divisor=now)
        current = streams.current()
        place = route.collectives.hook_stream or current
        streams.order(current, place)
        with streams.on(place), torch.no_grad():
            route.collectives.hook(out.narrow(0, 0, numel))
        streams.order(place, current)
        self.works = [(0, out.numel(), Work([out]))]
        return later

    def abandon(self) -> bool:
        """Ends and drops a reduction of a failed backward; returns whether gradients or sums are
        lost.
        """
        # It cannot be subtracted from gradients or a partial sum that it was added to.
        is_written = self.second is not self.route.second or self.is_complete
        if is_written:
            self.partial.is_live = False
        if not self.is_complete:
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
        elif self.shard is not None:
            self.shard.unbind()
        return is_written or self.has_sums

    def _finish(self) -> None:
        self.is_complete = True
        # They may reference gradients that were sent without a copy.
        self.works = []
        if self.slot is not None:
            self.slot.release(self.end)
        self.route.done.record(self.end)
