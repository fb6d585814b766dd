"""The gradients of parameter groups, from autograd's hooks to gradient shards.

Hooks collect the gradients of a group. Backwards without synchronization are summed; others are
packed into slots (FSDP2's copy-in) and reduced, in an order that all ranks share.

[Note: States of a group's gradients]
The table in docs/design/gradients.md says which gradients are final, waiting or half written, and
what may drop them.

[Note: Order of reductions]
The sequence of collectives must not depend on the data, or ranks that use different parameters
would pair up the wrong ones. Groups are therefore reduced in the reverse of the order in which
their units entered forward, each exactly once. A group that is complete early waits for its
predecessors, and one without gradients sends zeros. A group is complete when its unit's backward
ends, or, if no input of the unit needs a gradient, when all its gradients have arrived.

[Note: Producer streams]
Autograd runs a parameter's hook on the stream of its AccumulateGrad node, which is the stream that
was current when the parameter was first used. The stream on which the unit was unsharded is the
*pack stream*. A gradient that arrives on another stream records an event there. The pack stream
waits for exactly these events before it packs, and those streams wait for the pack before the
memory of their gradients is reused.

[Note: Branches that send nothing back]
A unit frees its unsharded parameters once the gradients of its inputs have arrived. A branch with a
detached input sends no such gradient, and on another stream it may still read the parameters. So
the stream that frees the memory first waits for all producers.

[Note: Touched flags]
After the parameters, each chunk has one element per parameter: 1 from a rank that had a gradient
for it, else 0. These flags are summed along with the gradients and tell every rank, without another
message, which parameters any rank has touched. The others keep `grad = None`, since weight decay
would act on zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from operator import attrgetter, or_
from typing import Any, NoReturn, Protocol

import torch

from shardgrad import ops
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param_group import FSDPParam, ParamGroup
from shardgrad.engine.reduction import PartialSum, ReduceRoute, Reduction
from shardgrad.engine.streams import Stream, StreamEvent, Streams, keep_for_current_stream
from shardgrad.engine.tracing import outside_graphs, span
from shardgrad.errors import CaptureError, GradientError, listed
from shardgrad.policies import REDUCES_IN_GRAD_DTYPE


class GradState(Enum):
    """How far the running backward has come with a group's gradients."""

    __hash__ = object.__hash__  # as Enum's, without a call of Python's for each transition

    IDLE = auto()  # no backward involves them: bound gradients are final
    COLLECTING = auto()  # they arrive from autograd: half written
    READY = auto()  # complete: waiting for the group's turn
    # Sent, with the reduction in flight or over; or added to the sums that wait on this rank.
    SENT = auto()


IDLE, COLLECTING, READY, SENT = GradState


class _Transitions(dict[tuple[GradState, GradState], GradState]):
    """The next state, by the present one and the next one. Any other pair raises."""

    def __missing__(self, pair: tuple[GradState, GradState]) -> GradState:
        raise RuntimeError(f"invalid transition of a group's gradients: {pair[0]} to {pair[1]}")


# Only `ReductionScheduler` makes transitions. The end of a backward leads from any state to IDLE.
_NEXT = _Transitions(
    {
        (IDLE, COLLECTING): COLLECTING,
        (IDLE, READY): READY,  # under `participate`, for a group of which this rank ran no forward
        (IDLE, SENT): SENT,  # gradients that the program has written, or that waited
        (COLLECTING, READY): READY,
        (COLLECTING, SENT): SENT,  # at the end of backward, after which no more gradients come
        (READY, SENT): SENT,
        (SENT, COLLECTING): COLLECTING,  # another call of the unit
        (SENT, SENT): SENT,  # gradients that the program wrote after the reduction
    }
)

_HOOKED = "_shardgrad_hooked"
# Whether the backward on this thread was called with `retain_graph=True`.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# Attributes that decide on the host what a backward does, besides `settings` and
# `partial.is_live`: gradients that wait. All are hashable; every replay compares them.
SWITCHES = ("is_due", "summed")
_IS_BOUND = attrgetter("is_bound")


@dataclass
class ReductionSettings:
    """What a program has set for the reductions of a unit.

    Attributes:
        requires_sync: False sums gradients on this rank, in a buffer of the reduce dtype.
        requires_all_reduce: False (HSDP) keeps the partial sum of the reduce-scatter.
        divide_factor: divides the sum over ranks; None for the number of ranks.
    """

    requires_sync: bool = True
    requires_all_reduce: bool = True
    divide_factor: float | None = None


class GradGroup:
    """Collects one group's gradients and reduces them into its gradient shard.

    Attributes:
        settings: those of the unit.
        params: the parameters with a place in the gradient layout, in order; see
            `refresh_trainable`.
        layout: of `params`, with a tail.
        shard: the gradient shard; None before the first reduction or after parameters were
            replaced.
        trainable: the group's `trainable` when places were last assigned; () before, and for
            parameters that replace others.
        holds_frozen: some of `params` do not require grad.
        takes_part: a backward reduces the group: one of `params` requires grad, or gradients exist.
        unsharded: the unsharded parameters of `params`, once they exist.
        hooks_made_for: the group's `trainable` when hooks were last installed.
        state: changed by the scheduler.
        waits_for_unit: the unit's post-backward tells when no more gradients come.
        is_due: an earlier backward was not synchronized. If this rank has no sums, others may.
        scheduler: of the root; None before the root is known.
        gradients: those that have arrived.
        sums: unsharded gradients of backwards without synchronization, side by side; 1-D.
        summed: per parameter, whether the waiting sums include a gradient of it; () if none wait.
        partial: reduce-scattered gradients that wait for the second step.
        pack_stream: the stream that parameters were unsharded for; changed only while no gradient
            is collected.
        read_on: streams on which this backward has read the parameters, or on which gradients
            arrived or were packed, without an event.
    """

    def __init__(self, group: ParamGroup, settings: ReductionSettings) -> None:
        self.group = group
        self.settings = settings
        self.state = IDLE
        self.waits_for_unit = False
        self.is_due = False
        self.scheduler: ReductionScheduler | None = None
        self.partial = PartialSum()
        self.shard: GradShard | None = None
        self._route: ReduceRoute
        self.trainable: tuple[bool, ...] = ()
        self.holds_frozen = self.takes_part = False
        self.pack_stream: Stream = None
        self.read_on: dict[Stream, None] = {}
        self._foreign: dict[Stream, StreamEvent] = {}
        self._place([])
        group.grads = self

    # -- trainable parameters

    def refresh_trainable(self) -> None:
        """Assigns places in the gradient layout to the parameters that require grad.

        Called when a backward begins, if the group's `trainable` has changed, or if there are
        frozen parameters in the layout, whose gradients may have been set to None since.

        A parameter that stops requiring grad keeps its place while it has a gradient, while
        gradients wait, or if no other needs one: a GAN freezes and thaws a model in every step, and
        a graph cannot contain new places. One that begins to require grad gets a place. Waiting
        gradients are reduced first, because they were packed with the old layout.
        """
        is_new, trainable = not self.trainable, self.group.carry_requires_grad()
        # Clipping and the optimizer have to find an existing gradient, also if its parameter was
        # frozen since.
        params, attribute = self.group.params, self.group.gradient_policy.attribute
        kept = {p for p in params if getattr(p.sharded, attribute, None) is not None}
        kept |= {p for p in params if p.unsharded is not None and p.unsharded.grad is not None}
        if self.is_due or self.partial.is_live:
            kept.update(self.params)
        placed = [p for p in params if p.sharded.requires_grad or p in kept]
        self.takes_part = bool(placed)
        placed = placed or self.params
        is_moved, scheduler = is_new or placed != self.params, self.scheduler
        is_captured = scheduler is not None and scheduler.comm_ctx.is_captured
        if is_captured and is_moved and not is_new:
            self._refuse_in_capture(placed)
        # After a refusal, the places are still to be assigned. Below, waiting gradients are reduced
        # in their former places first.
        self.trainable = trainable
        if is_moved:
            if scheduler is not None:
                scheduler.finish(self)
            self._place(placed)
        else:
            self.hook()  # for those that require grad again
        self.holds_frozen = len(placed) != sum(self.trainable)

    def _refuse_in_capture(self, placed: list[FSDPParam]) -> NoReturn:
        """Refuses a new layout inside a capture, because its tables are copied from the host."""
        changed = [p.name for p in self.group.params if (p in self.params) != (p in placed)]
        raise CaptureError(
            "requires_grad of parameters without a gradient changed inside a graphed step",
            expected="the same parameters with requires_grad or a gradient throughout the step",
            got=f"a change in {self.group.where}",
            where=f"parameter {listed(changed, 1)}",
            fix="call zero_grad() after unfreezing, or zero_grad(set_to_none=False); or freeze "
            "parameters between calls",
        )

    def _place(self, placed: list[FSDPParam]) -> None:
        """Sets the layout in which gradients are collected, summed and packed; none may be waiting.

        Existing gradients keep their memory while they are bound. A reduction that adds to them
        copies them to their new places first.
        """
        group = self.group
        self.params = placed
        self.layout = group.layout_of(placed, with_flags=True)
        self._route_made_for: tuple[object, ...] = ()  # the arguments of `_route` that may change
        self._nothing = torch.empty(0, dtype=group.gather_dtype, device=group.mesh.device)
        self.partial.tensor = self._nothing
        self.sums = torch.empty(0, dtype=group.reduce_dtype, device=group.mesh.device)
        self._sums_used: StreamEvent | None = None  # None before the first sum
        self.summed: tuple[bool, ...] = ()
        self.read_on.clear()
        self._drop_collected()
        self._leave_shard()
        self.hook()

    def _leave_shard(self) -> None:
        """Drops the gradient shard, whose memory the bound gradients keep alive."""
        if self.shard is not None and self.shard.has_memory:
            keep_for_current_stream(self.shard.flat)
            self.shard.leave()
        self.shard = None

    def params_replaced(self) -> None:
        """Drops what was laid out for former parameters."""
        self.trainable = ()
        self._leave_shard()

    def hook(self) -> None:
        """Installs the hooks that collect the gradients of trainable parameters."""
        self.hooks_made_for = self.group.trainable
        self._index = {id(p.unsharded): p for p in self.params}
        self.unsharded = [p.unsharded for p in self.params if p.unsharded is not None]
        # Hooks on parameters, not on the module, collect a gradient whichever path the loss took.
        # Autograd runs them on the stream of the AccumulateGrad node (pytorch#140044,
        # DeepSpeed#7965), which `take` records.
        hook = partial(_collect, weakref.ref(self))
        for p in self.group.params:
            unsharded = p.unsharded
            if unsharded is None or not unsharded.requires_grad:
                continue
            if _HOOKED not in unsharded.__dict__:
                unsharded.__dict__[_HOOKED] = True
                unsharded.register_post_accumulate_grad_hook(hook)
                if REDUCES_IN_GRAD_DTYPE and self.group.reduce_dtype.itemsize > unsharded.itemsize:
                    # Accepts the dtype that autograd computes, which may be wider than the
                    # parameter's.
                    unsharded.grad_dtype = None

    # -- the gradient shard

    def require_shard(self) -> GradShard:
        """Returns the gradient shard, created at the first call; it may have no memory yet."""
        if not self.trainable:
            self.refresh_trainable()
        if self.shard is None:
            with torch.inference_mode(mode=False):  # the shard is for training
                self.shard = GradShard(self.group, self.params, self.layout)
        return self.shard

    # -- states

    @property
    def is_reduced(self) -> bool:
        """True if this backward has sent the gradients instead of adding them to waiting sums."""
        return self.state is SENT and not self.is_due

    def join(self) -> None:
        """Completes what a backward with `set_is_last_backward(False)` has left in flight; see
        `ReductionScheduler.join`.

        Called where all ranks do: a second step is a collective.
        """
        if self.scheduler is not None and self.scheduler.in_flight:
            self.scheduler.join()

    def drop_waiting(self) -> None:
        """Drops waiting sums and gradients that the program has set on unsharded parameters.

        A reduction stays due, since other ranks may still have sums.
        """
        self.join()  # it may leave a partial sum
        self.summed = ()
        self.partial.is_live = False
        for unsharded in self.unsharded:
            unsharded.grad = None

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers of gradients that wait for a later backward, by kind."""
        found: dict[str, torch.Tensor] = {}
        if self.summed:
            found["sum of unreduced gradients"] = self.sums
        if self.partial.is_live:
            found["partial sum of gradients"] = self.partial.tensor
        return found

    def known_to_graph(self) -> object:
        """Returns the objects whose memory a graph may use, for the graph to keep alive."""
        return (
            self.shard,
            self.layout,
            self.sums,
            self.partial.tensor,
            self.scheduler and self.scheduler.comm_ctx.tails,
        )

    # -- collecting

    def touched(self) -> tuple[bool, ...]:
        """Returns, per parameter, whether a gradient has arrived or is in the sums."""
        here = map(self.gradients.__contains__, self.params)
        return tuple(map(or_, self.summed, here) if self.summed else here)

    def take(
        self,
        unsharded: torch.Tensor,
        grad: torch.Tensor,
        streams: Streams,
        *,
        is_written: bool = False,
    ) -> bool:
        """Takes a gradient; returns whether all gradients of the group have arrived.

        Args:
            unsharded: the unsharded parameter.
            grad: its gradient.
            streams: of the root.
            is_written: the program has written `grad`, not autograd.

        Streams: called on the stream of the parameter's AccumulateGrad node, which wrote `grad`.

        Raises:
            GradientError: the gradient is sparse.
        """
        # Otherwise autograd would add the next gradient to this one, on whatever stream it then
        # runs. It only accumulates into an existing `.grad`, so now each gradient arrives
        # separately.
        unsharded.grad = None
        if grad.requires_grad:  # `create_graph=True`: the graph ends at the reduction
            grad = grad.detach()
        p = self._index[id(unsharded)]
        if not (is_written or p.sharded.requires_grad):
            return False  # frozen since the forward
        if grad.layout is not torch.strided:
            raise GradientError(
                "a gradient of a sharded parameter cannot be used",
                expected="a dense gradient",
                got=f"layout {grad.layout}, shape {tuple(grad.shape)}",
                where=f"parameter {p.name}",
                fix="sparse=False in the embedding, or exclude it by fully_shard(..., "
                "ignored_params=...)",
            )
        stream = streams.current()
        earlier = self.gradients.get(p)
        if earlier is not None:
            # Reentrant checkpointing repeats the parameter's node. The earlier gradient may have
            # come on the pack stream, which records no event of its own.
            self.wait_for_producers(stream)
            streams.order(self.pack_stream, stream)
            keep_for_current_stream(earlier)
            grad = earlier + grad
        self.gradients[p] = grad
        if stream == self.pack_stream:
            self.read_on[stream] = None
        else:  # [Note: Producer streams]
            event = self._foreign.get(stream)
            if event is None:
                event = self._foreign[stream] = streams.event()
            event.record(stream)
        return len(self.gradients) == len(self.params)

    def wait_for_producers(self, stream: Stream) -> None:
        """Makes `stream` wait for all gradients that did not arrive on the pack stream."""
        for event in self._foreign.values():
            event.wait(stream)

    def order_before(self, stream: Stream, streams: Streams) -> None:
        """Makes `stream`, which frees the parameters, wait for all that has read them.

        See [Note: Branches that send nothing back]. Free if all of backward runs on `stream`.
        """
        self.wait_for_producers(stream)
        # Several if a unit was unsharded on one stream and recomputed on another, or if its calls
        # ran on several.
        for reader in self.read_on:
            streams.order(reader, stream)
        self.read_on.clear()

    def _let_go(self, streams: Streams) -> None:
        """Drops the collected gradients, after making their streams wait for the pack stream."""
        self.read_on[self.pack_stream] = None
        # The allocator reuses a gradient's memory on the stream that wrote it. That stream must
        # wait for the pack, which read the gradient.
        for stream in self._foreign:
            streams.order(self.pack_stream, stream)
        self._drop_collected()

    def _drop_collected(self) -> None:
        """Drops all collected gradients."""
        self.gradients: dict[FSDPParam, torch.Tensor] = {}
        self._foreign.clear()

    def collect_written(self, streams: Streams) -> None:
        """Collects gradients that the program has set itself, for which no hook runs.

        Zero-bubble schedules do this.

        Streams: assumes that they were written on the current stream. As in plain torch, a program
        whose gradients lie in another stream's memory calls `record_stream`.
        """
        for unsharded in self.unsharded:
            if unsharded.grad is not None:
                # Megatron's fused weight gradients and zero-bubble schedules set them
                # (pytorch#144530).
                self.take(unsharded, unsharded.grad, streams, is_written=True)

    # -- sums of backwards without synchronization

    def add_up(self, streams: Streams) -> None:
        """Adds the collected gradients to the sums on this rank, and drops them.

        Streams: the pack stream, after every producer. Capture: safe; the memory is persistent.
        """
        stream, layout = self.pack_stream, self.layout.whole
        self.wait_for_producers(stream)
        with streams.on(stream):
            if self._sums_used is None:
                with torch.inference_mode(mode=False):
                    self.sums = self.sums.new_empty(layout.chunk_numel)
                self._sums_used = streams.event()
            self._sums_used.wait(stream)  # earlier backwards may have used another pack stream
            ops.pack(
                self._contiguous(),
                self.sums,
                layout.table,
                chunk_numel=layout.chunk_numel,
                accumulate=bool(self.summed),
            )
            self._sums_used.record(stream)
        self.summed = self.touched()
        self._let_go(streams)

    # -- packing

    def pack(
        self,
        touched: tuple[bool, ...],
        target: torch.Tensor,
        comm_ctx: CommContext,
        divisor: float,
        *,
        accumulate: bool = False,
        zero_copy: bool = False,
    ) -> list[torch.Tensor]:
        """Packs the collected gradients, the sums and the tail into chunks for all ranks.

        Drops the collected gradients and the sums afterwards.

        Args:
            touched: the flags in the tail.
            target: 1-D; in a slot, or the gradient shard.
            comm_ctx: of the root.
            divisor: divides the gradients; 1 with `zero_copy`.
            accumulate: add to `target` instead of overwriting it.
            zero_copy: leave out zero-copy parameters.

        Returns:
            The gradients of zero-copy parameters, 1-D in the gather dtype; zeros for a parameter
            without one. They may be read until the slot is released.

        Streams: the pack stream, after every producer.
        """
        streams, stream, layout = comm_ctx.streams, self.pack_stream, self.layout
        tail = self._tail(touched, comm_ctx.tails)
        used = self._sums_used if self.summed else None
        if used is not None and self.gradients:
            self.add_up(streams)
        self.wait_for_producers(stream)
        sent_alone = []
        with streams.on(stream):  # nothing requires grad here, so no `no_grad` is needed
            if used is None:
                rows = self._contiguous()
            else:
                used.wait(stream)
                rows = layout.whole.local_views(self.sums, 0)
            if zero_copy:
                for i in layout.zero_copy:
                    row, dtype = rows[i], self._nothing.dtype
                    if row.numel():
                        # The next backward may write to the sums before they are sent, so copy
                        # them.
                        row = row.to(dtype, copy=used is not None).view(-1)
                    else:
                        row = row.new_zeros(layout.pieces[i].numel, dtype=dtype)
                    sent_alone.append(row)
                rows = [rows[i] for i in layout.others]
                layout = layout.packed
            # The table of `ops.pack` cannot describe the gaps of parameters sharded on an inner
            # dim.
            if layout.strided:
                from shardgrad.sharding.strided_pack import pack_strided

                pack_strided(rows, target, layout, divisor=divisor)
                rows = [row for i, row in enumerate(rows) if i not in layout.strided]
            rows, table, chunk_numel = [*rows, tail], layout.table_with_tail, layout.chunk_numel
            second = self.group.spec.second_step
            if second is not None:
                rows, table, chunk_numel = second.arrange(rows, table, chunk_numel)
            ops.pack(
                rows, target, table, chunk_numel=chunk_numel, divisor=divisor, accumulate=accumulate
            )
        if used is not None:
            used.record(stream)
            self.summed = ()
        self._let_go(streams)
        return sent_alone

    def _contiguous(self) -> list[torch.Tensor]:
        """Returns this rank's part of each gradient, contiguous; an empty tensor if there
        is none.
        """
        found = []
        for p in self.params:
            grad = self.gradients.get(p)
            if grad is None:
                # `ops.pack` writes zeros for it: other ranks may have a gradient to add.
                found.append(self._nothing)
                continue
            if type(grad) is not torch.Tensor:  # of a parameter that came as a DTensor
                grad = p.sharding.local_gradient(grad)
            found.append(grad.contiguous())
        return found

    def _tail(self, flags: tuple[bool, ...], tails: dict[Hashable, torch.Tensor]) -> torch.Tensor:
        """Returns the tail of every rank's chunk: the touched flags.

        Needs one launch for a new pattern of flags. Similar groups share it in `tails`: it has 128
        bytes per rank.
        """
        mesh, layout = self.group.mesh, self.layout
        dtype = self._nothing.dtype if self._nothing.is_floating_point() else torch.float32
        key = mesh.shard_group, flags, layout.alignment, dtype
        tail = tails.get(key)
        if tail is None:
            numel = layout.tail_numel
            chunk = torch.tensor(flags + (False,) * (numel - len(flags)), dtype=dtype)
            # One copy from the host for each pattern of flags; a training run has few.
            tail = tails[key] = chunk.repeat(mesh.shard_size).to(mesh.device)
        # It may have been created on another stream, and is dropped with the model.
        keep_for_current_stream(tail)
        return tail

    # -- reducing

    def launch(self, comm_ctx: CommContext, *, all_reduces: bool) -> Reduction:
        """Packs the collected gradients and starts the reduce-scatter.

        Without `all_reduces`, HSDP stops after the reduce-scatter and keeps a partial sum.

        Streams: packs on the pack stream, once the slot is free and after every producer on another
        stream. The reduce-scatter runs on the reduce stream, after all writes to the slot. A second
        step, and the kernel that writes the gradient shard or a partial sum, run on the stream of
        second steps if there is one. If nothing is sent, only the pack stream is used.
        """
        streams, group = comm_ctx.streams, self.group
        if not self.gradients:
            # Without gradients, nothing orders the forward's pack stream before this backward.
            self.pack_stream = streams.current()
        # Each step calls this for each group, so keep the route until an argument changes.
        factor = self.settings.divide_factor
        made_for = comm_ctx, group.collectives, factor, group.reduce_tag
        if self._route_made_for != made_for:
            self._route_made_for = made_for
            self._route = ReduceRoute(group, self.params, self.layout, factor, comm_ctx)
        route = self._route
        # Without the second step, only a partial sum remains.
        shard = self.require_shard() if all_reduces or route.second is None else None
        reduction = Reduction(
            route=route,
            shard=shard,
            touched=self.touched(),
            has_sums=bool(self.summed),
            second=route.second,
            partial=self.partial,
            reader=streams.current(),
            pack_stream=self.pack_stream,
            end=self.pack_stream if route.is_local else route.end,
        )
        with span("post_backward_reduce", group.name):
            if route.is_local:
                # The pack writes the gradient shard itself, after the previous reduction, which may
                # have ended on another pack stream.
                route.done.wait(reduction.end)
                reduction.write = partial(self.pack, reduction.touched, comm_ctx=comm_ctx)
            else:
                self._send(route, reduction)
            # If streams order the result, launch the end now; the host does not wait. With gloo,
            # the result is there only once the host has waited, so `join` does it.
            if route.transport.stream_ordered:
                with streams.on(reduction.end):
                    try:
                        reduction.complete()
                        if shard is not None and shard.awaiting_hooks:
                            shard.run_hooks()
                            route.done.record(reduction.end)
                    except BaseException:
                        # The scheduler does not know this reduction, so nothing else would release
                        # its slot.
                        reduction.abandon()
                        raise
        self.is_due = False
        return reduction

    def _send(self, route: ReduceRoute, reduction: Reduction) -> None:
        """Packs the gradients into a slot, except zero-copy ones, and starts the reduce-scatter."""
        streams, transport = route.comm_ctx.streams, route.transport
        is_whole = len(route.messages) > 1
        pack_stream, producers = self.pack_stream, (self.pack_stream, *self._foreign)
        with streams.on(pack_stream):  # slots are allocated on the pack stream
            slot, (send, own, room, staging, *receive) = route.ring.take(route.sizes, pack_stream)
            lent = self.pack(
                reduction.touched, send.whole, route.comm_ctx, route.before, zero_copy=is_whole
            )
        sent = [send]
        if is_whole:
            slot.lend(lent, producers)
            sent += [Chunks(gradient, transport.size) for gradient in lent]
            if not transport.receive_chunks:
                # Such a transport writes the sum into `own`, and only reads what is sent.
                receive = [Chunks(own.whole.narrow(0, *place), 1) for *place, _ in route.messages]
        slot.ready.record(pack_stream)
        with streams.on(streams.reduce):
            slot.ready.wait(streams.reduce)
            # NCCL runs all messages as one launch; other transports run them one after another.
            begins, numels, tags = zip(*route.messages, strict=True)
            works = transport.reduce_scatters(list(zip(sent, receive, tags, strict=True)))
            reduction.works = list(zip(begins, numels, works, strict=True))
        if route.second is not None:
            # The second step runs on its own stream, so that the next group's reduce-scatter does
            # not wait for it.
            route.done.record(streams.reduce)
            route.done.wait(route.end)
        reduction.slot, slot.finish = slot, reduction.complete
        reduction.own = own.whole if own.count else send.part(transport.rank)
        reduction.room, reduction.staging = room, staging.whole if staging.count else None

    def abandon_backward(self) -> bool:
        """Drops what a failed backward has not sent.

        Returns whether gradients of earlier backwards are lost with it.
        """
        was_summed = self.state is SENT and self.is_due
        # This backward was added to the sums of earlier ones, and cannot be subtracted.
        self._drop_collected()
        for unsharded in self.unsharded:
            unsharded.grad = None
        if was_summed:
            self.summed = ()
        return was_summed

    def end_backward(self) -> None:
        """Notes that no backward runs any more; autograd has synchronized its streams."""
        self.read_on.clear()
        self.waits_for_unit = False
        self.state = IDLE


@outside_graphs
def _collect(owner: weakref.ref[GradGroup], unsharded: torch.Tensor) -> None:
    """Takes a gradient from autograd, on the stream of the parameter's AccumulateGrad node.

    The hook holds a weak reference, because the garbage collector cannot see into hooks.
    """
    grads, grad = owner(), unsharded.grad
    if grads is None or grad is None or grads.scheduler is None:
        return
    # Autograd adds nothing to a frozen parameter: the program has set this gradient.
    if not unsharded.requires_grad:
        return
    scheduler = grads.scheduler
    if not scheduler.backward_running or scheduler.callback() is None:
        scheduler.begin_backward(in_autograd=True)
    # A hook that the program has registered here, on the unsharded parameter, comes next and reads
    # the gradient. `collect_written` takes it afterwards.
    is_last = len(unsharded._post_accumulate_grad_hooks or ()) == 1 and grads.take(
        unsharded, grad, scheduler.comm_ctx.streams
    )
    if scheduler.participation is not None:
        scheduler.participation.note(grads)
    # Only a group whose unit's inputs need no gradients is complete now. Others are closed by their
    # unit's post-backward.
    if is_last and not grads.waits_for_unit:
        scheduler.close(grads)


class Participation(Protocol):
    """Decides what one iteration gathers and reduces; see [Note: Participation].

    Attributes:
        reduces: it may have a backward.
    """

    reduces: bool

    def gather_through(self, unit: Any) -> None:
        """Unshards every unit up to and including one (None: all), while ranks may run different
        units. Nothing is resharded then before the backward ends.
        """

    def note(self, grads: GradGroup) -> None:
        """Records a forward, with or without grad, or a gradient that has arrived."""

    def begin(self) -> list[GradGroup]:
        """Returns the groups that the backward now beginning reduces, the last one first."""

    def is_complete(self, grads: GradGroup) -> bool:
        """Returns whether no further gradients can arrive before the end of the backward."""

    def refuse_late(self, grads: GradGroup) -> None:
        """Raises if gradients arrived after their reduction, because other ranks have none."""


class ReductionScheduler:
    """The part of a root's context that runs backwards, and decides the order of reductions under
    the root: see [Note: Order of reductions].

    Attributes:
        grad_groups: those under the root, in construction order.
        entered: those whose units ran a forward with grad enabled, in that order, and no backward
            since: the next backward reduces them.
    """

    def __init__(self, comm_ctx: CommContext, grad_groups: Sequence[GradGroup]) -> None:
        self.comm_ctx = comm_ctx
        self.grad_groups = grad_groups
        self.backward_running = False
        # Refers to what autograd calls at the end of a backward, and drops if that fails.
        self.callback: Callable[[], object] = weakref.ref(self)
        self.is_last_backward = True  # False for a micro-batch that others follow
        # True from a backward with `create_graph=True`, whose graph reads parameters again, until
        # backwards that retain no graph have ended each open graph. Nothing is resharded before.
        self.reads_again = False
        # Outermost forwards with grad enabled, minus the backwards that have ended their graphs.
        # One backward may have ended several: the count is right again once weights change.
        self.open_graphs = 0
        self.keeps_graph = False
        self.retains_graph = False  # this backward was called with `retain_graph=True`
        self.entered: dict[GradGroup, None] = {}
        self._queue: list[GradGroup] = []  # the last is reduced first
        self.in_flight: list[Reduction] = []  # launched by completed backwards
        self._launched: list[Reduction] = []  # by the running backward
        # None: a unit is gathered when it runs, and a backward reduces the groups that entered.
        self.participation: Participation | None = None

    def end_backward(self) -> None:
        """Called once, when autograd ends a backward whose start was seen; see `RootContext`."""

    def recover(self) -> None:
        """Clears a backward that failed; see `RootContext`."""

    def expect(self, grads: GradGroup) -> None:
        """Queues a group that backward has reached without a recorded forward; it is reduced next.

        This happens when reentrant checkpointing runs forward inside backward, or in the backward
        of an older graph. Another call of a unit may then follow its reduction. All ranks reduce it
        again, whichever have gradients.
        """
        is_again = grads.state is SENT and self.participation is None
        if grads.takes_part and (grads.state is IDLE or is_again):
            grads.waits_for_unit = True
            grads.state = _NEXT[grads.state, COLLECTING]
            self._queue.append(grads)

    def begin_backward(self, *, in_autograd: bool) -> None:
        """Fixes the order of this backward's reductions, once.

        `in_autograd` says that an autograd hook calls. A backward inside of another is a part of
        it. Clears a backward that failed, as the next forward would: this may be the backward of an
        older one.
        """
        if self.backward_running:
            if self.callback() is not None:
                return
            self.recover()
        self.backward_running = True
        self.callback = weakref.ref(self)
        # The program may have changed `requires_grad` at any time before, also inside a forward.
        for grads in self.grad_groups:
            if grads.group.carry_requires_grad() is not grads.trainable or grads.holds_frozen:
                grads.refresh_trainable()
        # Hooks run with grad enabled if backward creates a graph. A backward of such a graph may
        # also retain it.
        self.retains_graph = in_autograd and _keeps_graph()
        self.keeps_graph = in_autograd and (
            torch.is_grad_enabled() or (self.reads_again and self.retains_graph)
        )
        self.reads_again |= self.keeps_graph
        if in_autograd:
            # Autograd calls this at the end of the backward, whatever path the loss took.
            # Reductions do not depend on gradients of the root's outputs.
            callback = partial(self.end_backward)
            self.callback = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
            del callback  # a traceback may keep this frame
        # All ranks share the order of forwards, and so its reverse.
        self._queue = []
        for grads in self.entered:
            if grads.takes_part:
                grads.state = _NEXT[grads.state, COLLECTING]
                self._queue.append(grads)
        self.entered.clear()
        if self.participation is not None:
            # Under `participate`, every rank reduces the groups that any rank has run.
            self._queue = self.participation.begin()
            for grads in self._queue:
                if grads.state is IDLE:  # this rank has run no forward of it
                    grads.state = _NEXT[grads.state, READY]

    def close(self, grads: GradGroup) -> None:
        """Marks a group as complete, and reduces the complete groups at the head of the queue.

        Leaves the last group to the end of backward, which first frees its parameters and where
        there is nothing left to overlap with.
        """
        if self.participation is not None and not self.participation.is_complete(grads):
            return
        if grads.state is COLLECTING:
            grads.state = _NEXT[grads.state, READY]
        # Complete groups behind the head wait: the sequence of collectives must not depend on the
        # data.
        while len(self._queue) > 1 and self._queue[-1].state is READY:
            self._reduce(self._queue.pop())

    def _reduce(self, grads: GradGroup) -> None:
        # Zero-bubble schedules write gradients of unsharded parameters without autograd's hooks.
        grads.collect_written(self.comm_ctx.streams)
        only_sums = grads.group.stage.sums_unsharded and not self.is_last_backward
        if grads.settings.requires_sync and not only_sums:
            reduction = grads.launch(self.comm_ctx, all_reduces=grads.settings.requires_all_reduce)
            # At most two groups' gradients exist at once, those being sent and the next ones: end
            # the reduction before, if it still keeps zero-copy gradients alive.
            for earlier in self._launched[-1:]:
                slot = earlier.slot
                if slot is not None and slot.lent:
                    earlier.complete()
                    if slot is not reduction.slot:
                        slot.return_lent()
            self._launched.append(reduction)
            ring = self.comm_ctx.reduce_ring
            if len(self._queue) == 1 and not ring.keeps:
                # The last group is reduced at the end of the backward. Until then, as under FSDP2,
                # the gradients of one group are sent while those of the next are computed.
                ring.free_others(reduction.slot)
        else:
            # Even without a gradient on this rank: others may have one.
            grads.is_due = True
            if grads.gradients:
                grads.add_up(self.comm_ctx.streams)
        grads.state = _NEXT[grads.state, SENT]

    def drain(self, *, wait: bool) -> None:
        """Ends a backward: reduces the remaining groups under the root, in construction order.

        With `wait`, the current stream then waits for the gradients, if this is the last backward.
        If streams do not order the results, the host waits for them in any case. Otherwise
        reductions stay in flight.
        """
        # Groups without gradients are reduced as well: other ranks may have gradients for them.
        while self._queue:
            self._reduce(self._queue.pop())
        for reduction in self.in_flight:
            reduction.start_second_step()  # may leave a partial sum, or include the earlier one
        for grads in self.grad_groups:
            # These groups have gradients although their unit did not enter forward, for example
            # after `unshard()` by hand; or the program has written them; or earlier backwards have
            # left some.
            waits = grads.is_due or (grads.partial.is_live and not grads.is_reduced)
            grads.collect_written(self.comm_ctx.streams)
            if grads.gradients or waits:
                if self.participation is not None:
                    self.participation.refuse_late(grads)
                self._reduce(grads)
            grads.end_backward()
        self.backward_running = False
        # `join` completes them, or an earlier reduction that needs their slots.
        self.in_flight += self._launched
        self._launched = []
        # The program finds gradients after every backward.
        if wait and (self.is_last_backward or not all(map(_IS_BOUND, self.in_flight))):
            self.join()

    def join(self) -> None:
        """Completes every reduction in flight; the current stream waits for the gradients.

        If the program's hooks raise, raises the first error once all of them are completed.
        """
        # Launch all second steps before waiting for the first one, so that they overlap.
        for reduction in self.in_flight:
            if reduction.second is not None:
                reduction.start_second_step()
        stream = self.comm_ctx.streams.current()
        failed: BaseException | None = None
        for reduction in self.in_flight:
            reduction.complete()
            reduction.route.done.wait(stream)
            if reduction.shard is not None:
                reduction.shard.read.clear()
                # Last, because the host waits here for flags from the device, or for gradients that
                # are copied to it.
                reduction.shard.decide()
                try:
                    if reduction.shard.awaiting_hooks:
                        reduction.shard.run_hooks()
                except BaseException as error:
                    failed = failed or error
        self.in_flight = []
        for ring in self.comm_ctx.rings:
            ring.rewind()
        if failed is not None:
            raise failed

    def finish(self, grads: GradGroup) -> None:
        """Reduces a group's waiting gradients, and completes every reduction in flight.

        Called where all ranks change the group's layout, because these were packed with the old
        one.
        """
        # Called in a forward, which may be an evaluation in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            if grads.is_due or grads.partial.is_live:
                self.in_flight.append(grads.launch(self.comm_ctx, all_reduces=True))
            self.join()

    def inherit(self, other: ReductionScheduler) -> None:
        """Takes over groups that entered forward under another root and now belong to this one."""
        # Units outside the new root keep their old root.
        for grads in [grads for grads in other.entered if grads.scheduler is self]:
            del other.entered[grads]
            self.entered[grads] = None
        self.in_flight += other.in_flight
        # A graph created under the other root may read parameters of this one again.
        self.reads_again |= other.reads_again
        self.open_graphs += other.open_graphs

    def abandon_backward(self) -> list[str]:
        """Undoes a failed backward.

        Returns the names of the units that lose gradients which it has sent or been added to.
        """
        self.backward_running = self.reads_again = False
        # Reductions of earlier backwards are complete and stay in flight.
        launched, self._launched = self._launched, []
        mixed = {reduction.route.group for reduction in launched if reduction.abandon()}
        lost: dict[str, None] = {}
        for grads in self.grad_groups:
            if grads.abandon_backward() or grads.group in mixed:
                lost[grads.group.name] = None
            grads.end_backward()
        return list(lost)

    def drop_reductions(self) -> None:
        """Drops everything that is not in a gradient shard, and this backward's writes to
        shards.
        """
        for reduction in self.in_flight:
            reduction.abandon()
        self.in_flight = []
        self.entered.clear()
        self.abandon_backward()
        for ring in self.comm_ctx.rings:
            ring.rewind()
