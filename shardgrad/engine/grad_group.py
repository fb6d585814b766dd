"""The gradients of param groups: they are collected, packed and reduced, in an order that all ranks
share, and end in gradient shards.

[Note: States of a group's gradients]
The table in docs/design/gradients.md: what is final, waits, or is half-written, and what may
drop it.

[Note: Order of reductions]
The sequence of collectives must not depend on the data, or ranks that use different parameters
would pair up the wrong ones. Groups are therefore reduced in the reverse of the order in which
their units entered forward, each exactly once: a group that is complete early waits for its
predecessors, one that got no gradients sends zeros. A group is complete when its unit's backward is
over; if no input of the unit needs a gradient, when all are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import nn

from shardgrad.engine.buffers import Chunks, PieceSize, SlotRing
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_collector import GradCollector
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param import FSDPParam
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.reduction import OVERFLOWING, PartialSum, Reduction
from shardgrad.engine.spans import span
from shardgrad.engine.streams import Stream, StreamEvent, Streams
from shardgrad.engine.transports import MessageTag, Transport
from shardgrad.errors import CaptureError, listed
from shardgrad.policies import REDUCES_IN_GRAD_DTYPE

__all__ = [
    "SWITCHES",
    "TRANSITIONS",
    "GradGroup",
    "GradState",
    "ReductionScheduler",
    "grads_of",
]

# By the group's id; the GradGroup keeps the group alive.
_of: weakref.WeakValueDictionary[int, GradGroup] = weakref.WeakValueDictionary()


def grads_of(group: ParamGroup) -> GradGroup:
    """Returns the owner of a group's gradients."""
    return _of[id(group)]


class GradState(Enum):
    """How far the backward that is under way, or expected, has come with a group's gradients."""

    __hash__ = object.__hash__  # as of `ParamState`
    IDLE = auto()  # no backward concerns them: what is bound is final
    ENTERED = auto()  # the unit ran a forward, whose backward is expected
    COLLECTING = auto()  # they arrive from autograd: half-written, in the collector
    READY = auto()  # all are there, or no more are expected: waiting for the group's turn
    # They were sent, and the reduction is in flight or over; or added to what waits on this rank.
    SENT = auto()


# What may follow each state; `ReductionScheduler` makes all transitions.
TRANSITIONS = {
    GradState.IDLE: {GradState.ENTERED, GradState.COLLECTING, GradState.READY},
    GradState.ENTERED: {GradState.COLLECTING, GradState.IDLE},
    GradState.COLLECTING: {GradState.READY, GradState.IDLE},
    GradState.READY: {GradState.SENT, GradState.IDLE},
    GradState.SENT: {GradState.COLLECTING, GradState.READY, GradState.IDLE},
}


class _Route(NamedTuple):
    """How a group's gradients travel, as long as nothing is changed about that."""

    transport: Transport  # of the reduce-scatter
    ring: SlotRing  # of the slots that are sent
    before: float  # what gradients are divided by before the reduction
    after: float  # and after it
    end: Stream  # that reductions end on: the next reduce-scatter does not wait for a second step
    is_local: bool  # nothing is sent: the end packs into the gradient shard
    # Of each message, the beginning and the length of what it brings, and its tag. All after the
    # first are gradients that are sent from where they are.
    messages: list[tuple[int, int, MessageTag]]
    # All memory lies in one slot, in this order, so that a step uses the same addresses again: what
    # is sent, the sum of the first step, room for the second, what becomes the gradient shard on
    # the host, and what each message receives.
    sizes: list[PieceSize]


_HOOKED = "_shardgrad_hooked"
# Whether the backward that runs on this thread was called with `retain_graph=True`.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# What the host decides by between backwards, hashable, read at every replay: settings, and what
# waits.
SWITCHES = (
    "requires_sync",
    "requires_all_reduce",
    "divide_factor",
    "is_due",
    "collector.summed",
    "partial.is_live",
)


class GradGroup:
    """Collects one group's gradients and turns them into its gradient shard; `grads_of` finds
    it.
    """

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        # False sums gradients on this rank, in a buffer of the reduce dtype.
        self.requires_sync = True
        self.requires_all_reduce = True  # False (HSDP) keeps the partial sum of the reduce-scatter
        self.divide_factor: float | None = None  # of the sum over ranks; None for their number
        self.params: list[FSDPParam] = []  # with a place, in order; see `refresh_trainable`
        self.state = GradState.IDLE  # changed by the scheduler alone
        self.waits_for_unit = False  # its post-backward says when no more gradients come
        # An earlier backward was not synchronized: other ranks may have sums, if this one has none.
        self.is_due = False
        self.scheduler: ReductionScheduler | None = None  # of the root; None before that is known
        self.partial = PartialSum()
        self._shard: GradShard | None = None
        self._made_for: tuple[object, ...] = ()  # what `_route` depends on, besides places
        self._route: _Route
        self._done: StreamEvent  # recorded at the end of each reduction
        self.trainable: tuple[bool, ...] = ()  # of the group, when places were given last
        self.holds_frozen = False  # `params` has some that do not require grad
        self._generation = -1  # of the group, when parameters got their places
        self._hooked: object = None
        self.unsharded: list[nn.Parameter] = []  # those of `params`, once they exist
        self._second = None if group.spec.second_step is None else group.spec.second_step()
        self.collector = GradCollector(group, [], self._second)
        _of[id(group)] = self

    # -- what trains

    def refresh_trainable(self) -> None:
        """Gives the parameters that require grad their places; called while no backward runs, if
        `trainable` is not that of the group, or if it `holds_frozen` ones, whose
        gradients may be gone by now.

        A parameter that ceases to require grad keeps its place while it has a gradient, while
        gradients wait, or while a backward is expected. One that begins to require grad gets a
        place; what waits is reduced before, because it was packed for the places that there were.
        """
        trainable = self.group.carry_requires_grad()
        is_new = self._generation != self.group.generation
        if is_new:
            self._replace_shard()
        # A gradient that is there already has to be found by clipping and by the optimizer, also
        # if its parameter was frozen since.
        params, attribute = self.group.params, self.group.gradient_policy.attribute
        kept = {p for p in params if getattr(p.sharded, attribute, None) is not None}
        kept |= {p for p in params if p.unsharded is not None and p.unsharded.grad is not None}
        if not self._may_shrink:
            kept.update(self.params)
        placed = [p for p in params if p.sharded.requires_grad or p in kept]
        if is_new or placed != self.params:
            if self.scheduler is not None:
                self.scheduler.finish(self)
                if placed and self.scheduler.comm_ctx.is_captured and not is_new:
                    self._refuse_in_capture(placed)
            self._place(placed)
        else:
            self._hook()  # those that have begun to require grad again
        self.trainable = trainable
        self.holds_frozen = len(placed) != sum(trainable)

    @property
    def _may_shrink(self) -> bool:
        """True if places may go: nothing waits, and no backward is expected that may bring
        gradients, also of parameters that are thawed by then.
        """
        return self.state is GradState.IDLE and not self.is_due and not self.partial.is_live

    def _replace_shard(self) -> None:
        """Leaves the gradient shard of parameters that were replaced."""
        self._generation = self.group.generation
        self._leave_shard()
        if self.collector.dtype != self.group.reduce_dtype:
            self.forget()

    def _refuse_in_capture(self, placed: list[FSDPParam]) -> NoReturn:
        """Refuses other places than before in a capture: tables of them come from the host."""
        changed = [p.name for p in self.group.params if (p in self.params) != (p in placed)]
        raise CaptureError(
            "requires_grad changed inside a graphed step, of parameters without a gradient",
            expected="the same parameters that train or have a gradient, all through the step",
            got=f"others in unit {self.group.name or 'root'!r}",
            where=f"parameter {listed(changed, 1)}",
            fix="zero_grad() once they train again, or zero_grad(set_to_none=False); or freeze "
            "between calls",
        )

    def _place(self, placed: list[FSDPParam]) -> None:
        """Gives parameters their places among the gradients; nothing waits.

        Gradients of before keep their memory for as long as they are bound, and are copied to
        their new places where a reduction adds to them.
        """
        self.forget()
        self.partial.tensor = None
        self.params = placed
        pack_stream = self.collector.pack_stream
        self.collector = GradCollector(self.group, placed, self._second)
        self.collector.pack_stream = pack_stream
        self._made_for = ()
        self._leave_shard()
        self._hook()

    def _leave_shard(self) -> None:
        """Leaves the gradient shard to the gradients that are bound."""
        if self._shard is not None and self._shard.has_memory and self.scheduler is not None:
            self._shard.leave()
            self.scheduler.left.append(self._shard)
        self._shard = None

    def unsharded_for(self, stream: Stream) -> None:
        """Takes note that the parameters were unsharded for `stream`; hooks them if they are new
        objects.
        """
        if self._hooked is not self.group.params[0].unsharded:
            self._hook()
        # Gradients that are here already, and came on the former pack stream, have left no event.
        if self.collector.count == 0:
            self.collector.pack_stream = stream

    def _hook(self) -> None:
        """Has the gradients of the trainable parameters collected."""
        if self.collector.count == 0:
            # Not while gradients are here: they lie in the order of before.
            self.collector.expect()
        self._hooked = self.group.params[0].unsharded
        self.unsharded = [p.unsharded for p in self.params if p.unsharded is not None]
        # At the parameter, not at the module, so that the gradient comes here whichever way the
        # loss has taken. Autograd runs it on the stream of the AccumulateGrad node (pytorch#140044,
        # DeepSpeed#7965), which the collector notes.
        hook = partial(_collect, weakref.ref(self))
        for unsharded in self.unsharded:
            if unsharded.requires_grad and _HOOKED not in unsharded.__dict__:
                unsharded.__dict__[_HOOKED] = True
                unsharded.register_post_accumulate_grad_hook(hook)
                if REDUCES_IN_GRAD_DTYPE and self.group.reduce_dtype.itemsize > unsharded.itemsize:
                    # What autograd gives, which may be wider than the parameter.
                    unsharded.grad_dtype = None

    # -- the gradient shard

    @property
    def shard(self) -> GradShard | None:
        """The gradient shard; None before the first reduction, and after parameters were
        replaced.
        """
        return self._shard if self._generation == self.group.generation else None

    def require_shard(self) -> GradShard:
        """Returns the gradient shard, making it at the first call; it may be without memory."""
        shard = self.shard
        if shard is None:
            if self._generation != self.group.generation:
                self.refresh_trainable()
            group = self.group
            dtype, policy, memory = group.gradient_dtype, group.gradient_policy, group.shard_memory
            with torch.inference_mode(mode=False):  # it is for training as well
                shard = self._shard = GradShard(
                    self.params, self.collector.layout, group.mesh, dtype, policy, memory
                )
        return shard

    # -- states

    @property
    def is_reduced(self) -> bool:
        """True if this backward has sent the gradients, and not added them to what waits here."""
        return self.state is GradState.SENT and not self.is_due

    def follow(self, other: GradGroup) -> None:
        """Takes over what a program has set, which is the same for all groups of a unit."""
        self.requires_sync = other.requires_sync
        self.requires_all_reduce = other.requires_all_reduce
        self.divide_factor = other.divide_factor

    def drop_waiting(self) -> None:
        """Drops sums that wait, and gradients that the program has set on unsharded parameters; a
        reduction stays due, since other ranks may still have theirs.
        """
        self.collector.summed = ()
        self.partial.is_live = False
        for unsharded in self.unsharded:
            unsharded.grad = None

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the memory in which sums wait for a later backward, by kind."""
        found: dict[str, torch.Tensor] = {}
        if self.collector.summed:
            found["sum of unreduced gradients"] = self.collector.sums
        if self.partial.live is not None:
            found["partial sum of gradients"] = self.partial.live
        return found

    def memory(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yields what is kept of gradients from step to step, with its owner."""
        if self._shard is not None and self._shard.has_memory:
            yield "gradients", self._shard.flat.untyped_storage()
        yield "unreduced gradients", self.collector.sums.untyped_storage()
        if self.partial.live is not None:
            yield "unreduced gradients", self.partial.live.untyped_storage()
        for tail in self.collector.tails.values():
            yield "tails", tail.untyped_storage()

    def forget(self) -> None:
        """Drops everything that has arrived and not been reduced."""
        self.collector.forget()
        self.collector.summed = ()
        self.is_due = self.partial.is_live = False

    # -- collecting

    @property
    def has_come(self) -> bool:
        """True if gradients are here: from autograd, or set by the program."""
        if self.collector.count:
            return True
        for param in self.unsharded:  # noqa: SIM110  # once for each group in each backward
            if param.grad is not None:
                return True
        return False

    def _collect_written(self, streams: Streams) -> None:
        """Takes gradients that the program has set, as zero-bubble schedules do: no hook runs for
        them.

        Streams: they are taken to be written on the current one; as in plain torch, a program
            whose gradients lie in another one's memory calls `record_stream`.
        """
        for unsharded in self.unsharded:
            if unsharded.grad is not None:
                # As Megatron's fused weight gradients and zero-bubble schedules leave them
                # (pytorch#144530).
                self.collector.take(unsharded, unsharded.grad, streams, is_written=True)

    def accumulate(self, comm_ctx: CommContext) -> None:
        """Adds the collected gradients to this rank's unsharded sum, without communication."""
        self._collect_written(comm_ctx.streams)
        # On this rank even if it has no gradient: others may have one.
        self.is_due = True
        if self.collector.count:
            self.collector.add_up(comm_ctx.streams)

    # -- reducing

    def _route_under(self, comm_ctx: CommContext) -> _Route:
        """Returns how the gradients travel, worked out again where something about that was
        changed.
        """
        # Each step asks for each group, so the answer is kept until one of these is another.
        group = self.group
        made_for = comm_ctx, group.collectives, self.divide_factor, group.reduce_tag
        if self._made_for != made_for:
            self._made_for, self._route = made_for, self._new_route(comm_ctx)
            self._done = comm_ctx.streams.event()
        return self._route

    def _new_route(self, comm_ctx: CommContext) -> _Route:
        group, layout, second = self.group, self.collector.layout, self._second
        transport, ring = group.collectives.for_reduce(comm_ctx, group.mesh.gather_group)
        end, room = comm_ctx.streams.reduce, (0, 0)
        if second is not None:
            end, room = comm_ctx.streams.second, second.room(comm_ctx, layout.chunk_numel)
        before, after = self._divisors()
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
            piece, tag = layout.pieces[i], MessageTag(f"reduce-scatter of {self.params[i].name}")
            messages.append((piece.shard_offset, piece.shard_numel, tag))
        # On the wire gradients may be narrower than their sum; then the sum needs other memory.
        has_own = is_whole or (wire != sums and not ends_here)
        sizes = [
            (wire, ranks, chunk_numel - skipped),
            (sums, int(has_own), chunk_numel),
            (sums, *room),
            (group.gradient_dtype, int(is_offloaded), layout.chunk_numel),
            *((wire, transport.receive_chunks, numel) for _, numel, _ in messages),
        ]
        return _Route(transport, ring, before, after, end, is_local, messages, sizes)

    def _divisors(self) -> tuple[float, float]:
        """Returns what gradients are divided by before the reduction, and after it.

        fp16 splits the factor around its square root, into powers of two as FSDP2 does; fp32 and
        bf16 divide once, where there is least to divide.
        """
        factor = self.divide_factor or float(self.group.mesh.data_parallel_size)
        if self.group.reduce_dtype not in OVERFLOWING:
            return 1.0, factor
        # Half of the division comes before the sum, which would overflow, and half after it, since
        # what is divided too early underflows.
        before = 1.0
        while factor % before == 0 and factor / before > before:
            before *= 2
        return before, factor / before

    def launch(self, comm_ctx: CommContext, *, all_reduces: bool) -> Reduction:
        """Packs what has been collected and starts the reduce-scatter; without `all_reduces`,
        HSDP stops after it and keeps a partial sum.

        Streams: the pack runs on the pack stream, after the slot is free and after every foreign
        producer; the collective runs on the reduce stream, after every writer of the slot; a second
        step, and what writes the gradient shard or a partial sum, on the stream of second steps if
        there is one. Without anything to send, the pack stream alone is used.
        """
        group, streams, collector = self.group, comm_ctx.streams, self.collector
        # Zero-bubble schedules write gradients of unsharded parameters without autograd's hook.
        self._collect_written(streams)
        if self.collector.count == 0:
            # No gradient has brought the pack stream of a forward into this backward's order.
            self.collector.pack_stream = streams.current()
        route = self._route_under(comm_ctx)
        shard = None  # without the second step, only a partial sum is left
        if all_reduces or self._second is None:
            shard = self.require_shard()
            # The pack stream is that of backward: freed activations, which the allocator keeps for
            # each stream, become gradients without more memory.
            shard.expect(collector.pack_stream, is_captured=comm_ctx.is_captured)
        reduction = Reduction(
            stream_ordered=route.transport.stream_ordered,
            shard=shard,
            touched=collector.touched(),
            has_sums=bool(collector.summed),
            divisor=route.after,
            partial=self.partial,
            second=self._second,
            tag=group.reduce_tag,
            collectives=group.collectives,
            comm_ctx=comm_ctx,
            reader=streams.current(),
            end=route.end,
            done=self._done,
        )
        with span("post_backward_reduce", group.name):
            if route.is_local:
                # The pack writes the gradient shard itself. It comes after the former reduction,
                # which may have ended on another pack stream.
                reduction.end = collector.pack_stream
                reduction.done.wait(reduction.end)
                reduction.write = partial(collector.pack, None, reduction.touched, streams=streams)
            else:
                self._send(route, reduction)
            # Where streams order the result, the end is launched now and the host goes on. Gloo's
            # result is there when the host has waited, so its end comes with the join.
            if route.transport.stream_ordered:
                with streams.on(reduction.end):
                    try:
                        reduction.complete()
                    except BaseException:
                        # the scheduler does not know it, and its slot would stay taken
                        reduction.abandon()
                        raise
        self.is_due = False
        return reduction

    def _send(self, route: _Route, reduction: Reduction) -> None:
        """Packs the gradients into a message, except those that are sent from where they are, and
        starts the reduce-scatter.
        """
        streams, transport = reduction.comm_ctx.streams, route.transport
        is_whole = len(route.messages) > 1
        with streams.on(self.collector.pack_stream):  # slots are allocated for it
            slot, (send, own, room, staging, *receive) = route.ring.take(route.sizes)
            lent = self.collector.pack(
                slot, reduction.touched, send.whole, streams, route.before, zero_copy=is_whole
            )
        sent = [send, *(Chunks(gradient, transport.size) for gradient in lent)]
        if is_whole and not transport.receive_chunks:
            # A transport that needs no room adds up in this rank's chunk, and only reads.
            receive = [Chunks(own.whole.narrow(0, *place), 1) for *place, _ in route.messages]
        messages = list(zip(route.messages, sent, receive, strict=True))
        with streams.on(streams.reduce):
            # Several streams may have filled a slot: the collective waits for every one of them.
            slot.start_reading(streams.reduce)
            # NCCL makes one launch of them; elsewhere they follow each other.
            with transport.together(messages):
                works = []
                for (begin, numel, tag), chunks, place in messages:
                    work = transport.reduce_scatter(chunks, place, tag)
                    works.append((begin, numel, work))
        if self._second is not None:
            # What follows the reduce-scatter has a stream of its own, so that the next group's
            # reduce-scatter does not wait for it.
            reduction.done.record(streams.reduce)
            reduction.done.wait(reduction.end)
        reduction.works, reduction.slot, slot.holder = works, slot, reduction
        reduction.own = own.whole if own.count else send.part(transport.rank)
        reduction.room, reduction.staging = room, staging.whole if staging.count else None

    def abandon_backward(self) -> bool:
        """Drops what a failed backward has not sent; returns whether what earlier ones left goes
        with it.
        """
        was_summed = self.state is GradState.SENT and not self.is_reduced
        # This backward was added to earlier ones, and its part cannot be taken out again.
        self.collector.forget()
        if was_summed:
            self.is_due = False
            self.collector.summed = ()
        return was_summed

    def move(self, state: GradState) -> None:
        """Goes on to a state; a RuntimeError if it is not in `TRANSITIONS`."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(
                f"{self.group.name or 'root'!r}: gradients: no way from {self.state} to {state}"
            )
        if state is GradState.IDLE:  # autograd has joined its streams
            self.collector.pack_streams.clear()
            self.waits_for_unit = False
        self.state = state


def _collect(owner: weakref.ref[GradGroup], unsharded: torch.Tensor) -> None:
    """Takes a gradient from autograd, on the stream of the parameter's AccumulateGrad node.

    The hook does not keep its owner alive: the garbage collector cannot look into hooks.
    """
    grads, grad = owner(), unsharded.grad
    if grads is None or grad is None:
        return
    scheduler = grads.scheduler
    if scheduler is None:
        raise RuntimeError(
            f"a gradient of unit {grads.group.name or 'root'!r} before a root was known"
        )
    # The scheduler has to know of the first gradient, with which a backward begins, and of the last
    # of each group; the calls for all others would cost more than what they do.
    is_last = grads.collector.take(unsharded, grad, scheduler.comm_ctx.streams)
    if is_last or not scheduler.backward_running or scheduler.enrolment is not None:
        scheduler.arrived(grads)


class Enrolment(Protocol):
    """Decides what one backward reduces; see [Note: Participation]."""

    def note(self, grads: GradGroup) -> None:
        """Takes note of a forward, also one without gradients, and of a gradient that has come."""

    def begin(self) -> list[GradGroup]:
        """Returns what the backward that begins now reduces, the last one first."""

    def is_complete(self, grads: GradGroup) -> bool:
        """Returns whether no more gradients than are here can come before the end of the
        backward.
        """

    def refuse_late(self, grads: GradGroup) -> None:
        """Raises if gradients have come after their reduction, since other ranks have none."""


class ReductionScheduler:
    """Decides the order of reductions under one root. See [Note: Order of reductions]."""

    def __init__(self, comm_ctx: CommContext, end_backward: Callable[[], None]) -> None:
        self.comm_ctx = comm_ctx
        # Called once when autograd ends a backward that was seen to begin.
        self._end_backward = end_backward
        self.backward_running = False
        self.is_last_backward = True  # False for a micro-batch that others follow
        # True from a backward that makes a graph (`create_graph=True`), which reads parameters
        # again, to the end of one that keeps none: nothing is resharded in between.
        self.reads_again = False
        self._keeps_graph = False
        self._entered: list[GradGroup] = []
        self._queue: list[GradGroup] = []  # the last is reduced first
        self._earlier: list[Reduction] = []  # in flight, of backwards that are complete
        self._launched: list[tuple[GradGroup, Reduction]] = []  # by the backward that is running
        self.left: list[GradShard] = []  # that groups have left for others
        self.enrolment: Enrolment | None = None  # None: a backward reduces the groups that entered

    def enter(self, grads: GradGroup) -> None:
        """Notes that a unit entered forward with gradients on; its group will be reduced in this
        backward.
        """
        if self.enrolment is not None:
            self.enrolment.note(grads)
        if self.backward_running:
            self.expect(grads)
        elif grads.state is GradState.IDLE:
            grads.move(GradState.ENTERED)
            self._entered.append(grads)

    def expect(self, grads: GradGroup) -> None:
        """Makes a group that is not queued, but backward has come to, the next to finish.

        Reentrant checkpointing runs forward inside backward; a backward of an older graph runs
        none. There, another call of a unit may follow its reduction: all ranks reduce it again,
        whichever have gradients.
        """
        if grads.state is GradState.IDLE or (
            grads.state is GradState.SENT and self.enrolment is None
        ):
            grads.waits_for_unit = True
            grads.move(GradState.COLLECTING)
            self._queue.append(grads)

    def finish_reading(self) -> None:
        """At the end of a backward: forgets a graph that it has not kept."""
        self.reads_again = self._keeps_graph

    def begin_backward(self, *, in_autograd: bool) -> None:
        """Fixes the order of this backward's reductions, once; `in_autograd` says that a hook
        calls.
        """
        if self.backward_running:
            return
        self.backward_running = True
        # Grad mode is on in hooks if backward makes a graph; one that it was itself made of may be
        # kept.
        self._keeps_graph = in_autograd and (
            torch.is_grad_enabled() or (self.reads_again and _keeps_graph())
        )
        self.reads_again |= self._keeps_graph
        if in_autograd:
            # Called once all of this backward is done, whatever its loss was made of: reductions do
            # not depend on a gradient passing through the root's outputs.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        # Units entered forward in an order that all ranks share, so its reverse is one, too.
        self._queue, self._entered = self._entered, []
        for grads in self._queue:
            grads.move(GradState.COLLECTING)
        if self.enrolment is not None:
            # Under `participate` every rank reduces the groups that any rank has run, with a batch
            # or without.
            self._queue = self.enrolment.begin()
            for grads in self._queue:
                if grads.state is GradState.IDLE:  # this rank runs no forward of it
                    grads.move(GradState.READY)

    def arrived(self, grads: GradGroup) -> None:
        """The first gradient of a backward or the last one of a group came in; reduces what can
        be.
        """
        if not self.backward_running:
            self.begin_backward(in_autograd=True)
        if self.enrolment is not None:
            self.enrolment.note(grads)
        # Only a unit whose inputs need no gradients ends so; all others say themselves when no more
        # gradients come.
        if grads.collector.count == len(grads.params) and not grads.waits_for_unit:
            self.close(grads)

    def close(self, grads: GradGroup) -> None:
        """Says that no more gradients are expected for this group; reduces what has become
        possible.
        """
        if self.enrolment is not None and not self.enrolment.is_complete(grads):
            return
        if grads.state is GradState.COLLECTING:
            grads.move(GradState.READY)
        self.reduce_ready()

    def reduce_ready(self) -> None:
        """Reduces, in order, the groups at the head of the queue that expect no more gradients.

        The last waits for the end of backward, where its parameters are freed and nothing is left
        to overlap.
        """
        # In order, whatever is ready behind the head: the sequence of collectives may not follow
        # the data.
        while len(self._queue) > 1 and self._queue[-1].state is GradState.READY:
            self._reduce(self._queue.pop())

    def _reduces_now(self, grads: GradGroup) -> bool:
        """False if this backward only adds to a sum on this rank."""
        return grads.requires_sync and (
            self.is_last_backward or not grads.group.stage.sums_unsharded
        )

    def _reduce(self, grads: GradGroup) -> None:
        # Not ready by itself, but backward is over: no more gradients come.
        if grads.state is not GradState.READY:
            grads.move(GradState.READY)
        if self._reduces_now(grads):
            reduction = grads.launch(self.comm_ctx, all_reduces=grads.requires_all_reduce)
            self._launched.append((grads, reduction))
            grads.move(GradState.SENT)
            # Gradients that are sent from where they are stay in memory until they are sent.
            if len(self._launched) > 1:
                self._return_lent(self._launched[-2][1], reduction)
        else:
            grads.accumulate(self.comm_ctx)
            grads.move(GradState.SENT)

    def _return_lent(self, earlier: Reduction, latest: Reduction) -> None:
        """Ends a reduction that has whole gradients in flight, so that there are no more of them
        than of two groups: of one that is sent, and of the next.
        """
        slot = earlier.slot
        if slot is None or not slot.lent:
            return
        earlier.complete()
        if slot is not latest.slot:
            slot.return_lent()

    def drain(self, groups: Iterable[GradGroup], *, wait: bool) -> None:
        """Ends a backward: reduces what is left of all groups under the root, given in construction
        order.

        With `wait`, the current stream then waits for the gradients; else reductions stay in
        flight.
        """
        # Groups that got nothing are reduced as well: other ranks may have gradients for them.
        while self._queue:
            self._reduce(self._queue.pop())
        for reduction in self._earlier:
            reduction.start_second_step()  # which leaves a partial sum, or takes it along
        for grads in groups:
            # Gradients that came without the unit entering forward, for example through unshard()
            # by hand, that the program has written, and what earlier backwards have left.
            is_partial = grads.partial.is_live and not grads.is_reduced
            waits = grads.is_due or (is_partial and grads.requires_all_reduce)
            if grads.has_come or (waits and self._reduces_now(grads)):
                if self.enrolment is not None:
                    self.enrolment.refuse_late(grads)
                self._reduce(grads)
            if grads.state is not GradState.IDLE:
                grads.move(GradState.IDLE)
        self.backward_running = False
        # Whether they are over is asked by `join`, or by the reduction that needs their slots.
        self._earlier += [reduction for _, reduction in self._launched]
        self._launched = []
        if wait:
            self.join()

    @property
    def is_any_in_flight(self) -> bool:
        """True if reductions of earlier backwards may still write gradients."""
        return bool(self._earlier)

    def join(self) -> None:
        """Completes every reduction in flight; the current stream waits for the gradients."""
        # All second steps are launched before the first is waited for, so that they overlap.
        for reduction in self._earlier:
            reduction.start_second_step()
        stream = self.comm_ctx.streams.current()
        for reduction in self._earlier:
            reduction.join(stream)
        self._earlier = []
        for ring in self.comm_ctx.rings:
            ring.rewind(stream)

    def finish(self, grads: GradGroup) -> None:
        """Reduces what waits in a group, and completes every reduction in flight.

        Called where all ranks change the group's places: what waits was packed for those of before.
        """
        # A forward calls, which may be an evaluation in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            if grads.is_due or grads.partial.is_live:
                self._earlier.append(grads.launch(self.comm_ctx, all_reduces=True))
            self.join()

    def inherit(self, other: ReductionScheduler) -> None:
        """Takes over the groups that entered under another root, and are under this one now."""
        # Units that the new root does not contain keep the root they had.
        self._entered += [grads for grads in other._entered if grads.scheduler is self]
        other._entered = [grads for grads in other._entered if grads.scheduler is not self]
        self._earlier += other._earlier
        # A graph that was made under the other root may read parameters of this one again.
        self.reads_again |= other.reads_again

    def abandon_backward(self, groups: Iterable[GradGroup]) -> list[str]:
        """Takes back a failed backward; returns the units that lose what it has sent or added
        to.
        """
        self.backward_running = self.reads_again = False
        # Reductions of backwards before this one are whole: they stay in flight.
        launched, self._launched = self._launched, []
        mixed = {grads for grads, reduction in launched if reduction.abandon()}
        lost: dict[str, None] = {}
        for grads in groups:
            if grads.abandon_backward() or grads in mixed:
                lost[grads.group.name] = None
            if grads.state is not GradState.IDLE:
                grads.move(GradState.IDLE)
        return list(lost)

    def abort(self, groups: Iterable[GradGroup]) -> None:
        """Drops everything that is not in a gradient shard, and what has been written there
        since.
        """
        for reduction in [*self._earlier, *(reduction for _, reduction in self._launched)]:
            reduction.abandon()
        self._earlier, self._launched = [], []
        self._entered.clear()
        self.enrolment = None
        self.abandon_backward(groups)
        for ring in self.comm_ctx.rings:
            ring.rewind()
