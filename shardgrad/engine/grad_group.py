"""The gradients of param groups: they are collected where autograd's hooks run, summed over
backwards that are not synchronized, packed into slots (FSDP2's copy-in) and reduced, in an order
that all ranks share, and end in gradient shards.

[Note: States of a group's gradients]
The table in docs/design/gradients.md: what is final, waits, or is half-written, and what may
drop it.

[Note: Order of reductions]
The sequence of collectives must not depend on the data, or ranks that use different parameters
would pair up the wrong ones. Groups are therefore reduced in the reverse of the order in which
their units entered forward, each exactly once: a group that is complete early waits for its
predecessors, one that got no gradients sends zeros. A group is complete when its unit's backward is
over; if no input of the unit needs a gradient, when all are there.

[Note: Producer streams]
Autograd runs a parameter's hook on the stream of its AccumulateGrad node, the one that was current
when the parameter was first used. A gradient that arrives on another stream than the one the unit
was unsharded on (the *pack stream*) leaves an event there; the pack stream waits for exactly these
events before it packs, and those streams wait for the pack before their gradient's memory is handed
back.

[Note: Branches that send nothing back]
A unit frees its unsharded parameters when the gradients of its inputs are there. A branch whose
input was detached is missing in them; on another stream, it may still read what is freed. So the
stream that frees memory first waits for all producers.

[Note: Touched flags]
Behind the parameters each chunk has one element per parameter: 1 from a rank that had a gradient
for it, else 0. Summed along with the gradients, they tell every rank, at no extra message, which
parameters were touched anywhere: the others keep `grad = None`, since weight decay would act on
zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from functools import partial
from itertools import repeat
from operator import is_not, or_
from typing import NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn

from shardgrad import ops
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param import FSDPParam
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.reduction import PartialSum, ReduceRoute, Reduction, reduce_route
from shardgrad.engine.streams import Stream, StreamEvent, Streams, keep_for_current_stream
from shardgrad.engine.tracing import NOTHING, outside_graphs, span
from shardgrad.errors import CaptureError, GradientError, listed
from shardgrad.policies import REDUCES_IN_GRAD_DTYPE
from shardgrad.sharding.layout import Piece, ShardLayout

__all__ = [
    "SWITCHES",
    "TRANSITIONS",
    "GradGroup",
    "GradState",
    "ReductionScheduler",
    "grads_of",
]

# By the group's id; the GradGroup keeps the group alive.
_of: WeakValueDictionary[int, GradGroup] = WeakValueDictionary()

# What groups that are alike pack behind their parameters, by the ranks that it is for.
_tails: WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[object, torch.Tensor]]
_tails = WeakKeyDictionary()


def grads_of(group: ParamGroup) -> GradGroup:
    """Returns the owner of a group's gradients."""
    return _of[id(group)]


class GradState(Enum):
    """How far the backward that is under way, or expected, has come with a group's gradients."""

    __hash__ = object.__hash__  # as of `ParamState`
    IDLE = auto()  # no backward concerns them: what is bound is final
    ENTERED = auto()  # the unit ran a forward, whose backward is expected
    COLLECTING = auto()  # they arrive from autograd: half-written
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


_HOOKED = "_shardgrad_hooked"
# Whether the backward that runs on this thread was called with `retain_graph=True`.
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# What the host decides by between backwards, beside `partial.is_live`; hashable, read at every
# replay: settings, and what waits.
SWITCHES = (
    "requires_sync",
    "requires_all_reduce",
    "divide_factor",
    "is_due",
    "summed",
)


class GradGroup:
    """Collects one group's gradients and turns them into its gradient shard; `grads_of` finds it.

    Attributes:
        requires_sync: False sums gradients on this rank, in a buffer of the reduce dtype.
        requires_all_reduce: False (HSDP) keeps the partial sum of the reduce-scatter.
        divide_factor: of the sum over ranks; None for their number.
        params: those that have a place among the gradients, in order; see `refresh_trainable`.
        layout: of these, with a tail.
        trainable: of the group, when places were given last.
        holds_frozen: `params` has some that do not require grad.
        unsharded: the unsharded parameters of `params`, once they exist.
        hooked: the group's first unsharded parameter of when they were hooked last.
        state: changed by the scheduler alone.
        waits_for_unit: its post-backward says when no more gradients come.
        is_due: an earlier backward was not synchronized: other ranks may have sums, if this one has
            none.
        scheduler: of the root; None before that is known.
        gradients: per parameter, what has arrived.
        count: of these.
        sums: whole gradients of backwards without synchronization, one after the other; 1-D.
        summed: per parameter, whether the sums that wait have a gradient of it; () if none wait.
        partial: what waits after the reduce-scatter.
        pack_stream: what parameters were unsharded for; changed while no gradient is here.
        tails: packed so far, by the stream that read them and their flags.
    """

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.requires_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.state = GradState.IDLE
        self.waits_for_unit = False
        self.is_due = False
        self.scheduler: ReductionScheduler | None = None
        self.partial = PartialSum()
        self._shard: GradShard | None = None
        self._made_for: tuple[object, ...] = ()  # what `_route` depends on, besides places
        self._route: ReduceRoute
        self.trainable: tuple[bool, ...] = ()
        self.holds_frozen = False
        self._generation = -1  # of the group, when parameters got their places
        self.hooked: nn.Parameter | None = None
        self.unsharded: list[nn.Parameter] = []
        self._second = None if group.spec.second_step is None else group.spec.second_step()
        self.pack_stream: Stream = None
        # Where gradients came or were packed on the pack stream of the time, which leave no event.
        self._pack_streams: dict[Stream, None] = {}
        self._foreign: dict[Stream, StreamEvent] = {}
        self._earlier: list[torch.Tensor] = []
        self._lay_out([])
        _of[id(group)] = self

    def _lay_out(self, placed: list[FSDPParam]) -> None:
        """Fixes in which places gradients are collected, summed and packed."""
        group = self.group
        self.params = placed
        self.layout = group.layout_of(placed, with_flags=True)
        self._nothing = torch.empty(0, dtype=group.gather_dtype, device=group.mesh.device)
        self.tails: dict[tuple[Stream, tuple[bool, ...]], torch.Tensor] = {}
        self.sums = torch.empty(0, dtype=group.reduce_dtype, device=group.mesh.device)
        self._sums_used: StreamEvent | None = None  # None before the first sum, which has no memory
        self.summed: tuple[bool, ...] = ()
        self._pack_streams.clear()
        self._expect()

    def _expect(self) -> None:
        """Starts over, for the parameters' unsharded objects of now."""
        self._index = {id(p.unsharded): i for i, p in enumerate(self.params)}
        self._drop_collected()

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
        if is_new:  # parameters were replaced
            self._generation = self.group.generation
            self._leave_shard()
        # A gradient that is there already has to be found by clipping and by the optimizer, also
        # if its parameter was frozen since.
        params, attribute = self.group.params, self.group.gradient_policy.attribute
        kept = {p for p in params if getattr(p.sharded, attribute, None) is not None}
        kept |= {p for p in params if p.unsharded is not None and p.unsharded.grad is not None}
        # Places may go if nothing waits, and no backward is expected that may bring gradients, also
        # of parameters that are thawed by then.
        if self.state is not GradState.IDLE or self.is_due or self.partial.is_live:
            kept.update(self.params)
        placed = [p for p in params if p.sharded.requires_grad or p in kept]
        if is_new or placed != self.params:
            if self.scheduler is not None:
                self.scheduler.finish(self)
                if placed and self.scheduler.comm_ctx.is_captured and not is_new:
                    self._refuse_in_capture(placed)
            self._place(placed)
        else:
            self.hook()  # those that have begun to require grad again
        self.trainable = trainable
        self.holds_frozen = len(placed) != sum(trainable)

    def _refuse_in_capture(self, placed: list[FSDPParam]) -> NoReturn:
        """Refuses other places than before in a capture: tables of them come from the host."""
        changed = [p.name for p in self.group.params if (p in self.params) != (p in placed)]
        raise CaptureError(
            "requires_grad changed inside a graphed step, of parameters without a gradient",
            expected="the same parameters that train or have a gradient, all through the step",
            got=f"others in {self.group.where}",
            where=f"parameter {listed(changed, 1)}",
            fix="zero_grad() once they train again, or zero_grad(set_to_none=False); or freeze "
            "between calls",
        )

    def _place(self, placed: list[FSDPParam]) -> None:
        """Gives parameters their places among the gradients; nothing waits.

        Gradients of before keep their memory for as long as they are bound, and are copied to
        their new places where a reduction adds to them.
        """
        self.partial.tensor = None
        self._lay_out(placed)
        self._made_for = ()
        self._leave_shard()
        self.hook()

    def _leave_shard(self) -> None:
        """Leaves the gradient shard to the gradients that are bound."""
        if self._shard is not None and self._shard.has_memory:
            keep_for_current_stream(self._shard.flat)
        self._shard = None

    def hook(self) -> None:
        """Has the gradients of the trainable parameters collected."""
        if self.count == 0:
            # Not while gradients are here: they lie in the order of before.
            self._expect()
        self.hooked = self.group.params[0].unsharded
        self.unsharded = [p.unsharded for p in self.params if p.unsharded is not None]
        # At the parameter, not at the module, so that the gradient comes here whichever way the
        # loss has taken. Autograd runs it on the stream of the AccumulateGrad node (pytorch#140044,
        # DeepSpeed#7965), which `take` notes.
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
            with torch.inference_mode(mode=False):  # it is for training as well
                shard = self._shard = GradShard(self.group, self.params, self.layout)
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
        self.summed = ()
        self.partial.is_live = False
        for unsharded in self.unsharded:
            unsharded.grad = None

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the memory in which sums wait for a later backward, by kind."""
        found: dict[str, torch.Tensor] = {}
        if self.summed:
            found["sum of unreduced gradients"] = self.sums
        if self.partial.live is not None:
            found["partial sum of gradients"] = self.partial.live
        return found

    def memory(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yields what is kept of gradients from step to step, with its owner."""
        if self._shard is not None and self._shard.has_memory:
            yield "gradients", self._shard.flat.untyped_storage()
        yield "unreduced gradients", self.sums.untyped_storage()
        if self.partial.live is not None:
            yield "unreduced gradients", self.partial.live.untyped_storage()
        for tail in self.tails.values():
            yield "tails", tail.untyped_storage()

    def known_to_graph(self) -> object:
        """Returns what has memory that a graph may read and write, to live as long as the graph."""
        return self.shard, self.layout, self.sums, self.tails

    # -- collecting

    def touched(self) -> tuple[bool, ...]:
        """Returns, per parameter, whether a gradient of it is here or in the sums."""
        here = map(is_not, self.gradients, repeat(None))
        return tuple(map(or_, self.summed, here) if self.summed else here)

    def take(
        self,
        unsharded: torch.Tensor,
        grad: torch.Tensor,
        streams: Streams,
        *,
        is_written: bool = False,
    ) -> bool:
        """Takes a gradient, `is_written` by the program or autograd's; returns whether all are
        here.

        Streams: called on the stream of the parameter's AccumulateGrad node, which `grad` was
        written on.

        Raises:
            GradientError: it is sparse.
        """
        # Autograd would add the next gradient to this one, on whatever stream it runs then. It only
        # adds where one is bound, so each comes here by itself.
        unsharded.grad = None
        if grad.requires_grad:  # `create_graph=True`: the graph ends where gradients are reduced
            grad = grad.detach()
        index = self._index[id(unsharded)]
        if not (is_written or self.params[index].sharded.requires_grad):
            return False  # frozen since the forward
        if grad.layout is not torch.strided:
            raise GradientError(
                "a gradient of a sharded parameter cannot be used",
                expected="a dense gradient",
                got=f"layout {grad.layout}, shape {tuple(grad.shape)}",
                where=f"parameter {self.params[index].name}",
                fix="sparse=False in the embedding, or leave it out: fully_shard(..., "
                "ignored_params=...)",
            )
        stream = streams.current()
        earlier = self.gradients[index]
        if earlier is None:
            self.gradients[index] = grad
            self.count += 1
        else:
            self.gradients[index] = self._add(earlier, grad, stream, streams)
        if stream == self.pack_stream:
            self._pack_streams[stream] = None
        else:  # [Note: Producer streams]
            event = self._foreign.get(stream)
            if event is None:
                event = self._foreign[stream] = streams.event()
            event.record(stream)
        return self.count == len(self.gradients)

    def _add(
        self, earlier: torch.Tensor, grad: torch.Tensor, stream: Stream, streams: Streams
    ) -> torch.Tensor:
        """Adds a second gradient of a parameter, whose node reentrant checkpointing runs several
        times.
        """
        for event in self._foreign.values():
            event.wait(stream)
        # The earlier one may have come on the pack stream, which leaves no event of its own.
        packing = streams.event()
        packing.record(self.pack_stream)
        packing.wait(stream)
        self._earlier.append(earlier)  # not handed back before the pack, which comes after this sum
        return earlier + grad

    def wait_for_producers(self) -> None:
        """Makes the pack stream wait for every gradient that arrived on another one."""
        for event in self._foreign.values():
            event.wait(self.pack_stream)

    def order_before(self, stream: Stream, streams: Streams) -> None:
        """Makes `stream` wait for all gradients since the last call, packed or not.

        See [Note: Branches that send nothing back]. Free where all of backward runs on `stream`.
        """
        for event in self._foreign.values():
            event.wait(stream)
        # Several, if a unit was unsharded on one stream and recomputed on another.
        for packed_on in self._pack_streams:
            if packed_on != stream:
                event = streams.event()
                event.record(packed_on)
                event.wait(stream)
        self._pack_streams.clear()

    def _let_go(self, streams: Streams) -> None:
        """Drops the gradients, once their streams are ordered after what the pack stream did with
        them.
        """
        self._pack_streams[self.pack_stream] = None
        # The allocator lends a gradient's memory again on the stream that wrote it, which therefore
        # has to come after the pack that read it.
        if self._foreign:
            packed = streams.event()
            packed.record(self.pack_stream)
            for stream in self._foreign:
                packed.wait(stream)
        self._drop_collected()

    def _drop_collected(self) -> None:
        """Drops what has arrived."""
        self.gradients: list[torch.Tensor | None] = [None] * len(self.params)
        self._foreign.clear()
        self._earlier.clear()
        self.count = 0

    def collect_written(self, streams: Streams) -> None:
        """Takes gradients that the program has set, as zero-bubble schedules do: no hook runs for
        them.

        Streams: they are taken to be written on the current one; as in plain torch, a program
            whose gradients lie in another one's memory calls `record_stream`.
        """
        for unsharded in self.unsharded:
            if unsharded.grad is not None:
                # As Megatron's fused weight gradients and zero-bubble schedules leave them
                # (pytorch#144530).
                self.take(unsharded, unsharded.grad, streams, is_written=True)

    # -- sums of backwards that are not synchronized

    def add_up(self, streams: Streams) -> None:
        """Adds what has arrived to the sums that wait on this rank; lets the gradients go.

        Streams: the pack stream, after every producer. Capture: safe; the memory stays.
        """
        stream, layout = self.pack_stream, self.layout.whole
        self.wait_for_producers()
        with streams.on(stream):
            if self._sums_used is None:
                with torch.inference_mode(mode=False):
                    self.sums = self.sums.new_empty(layout.chunk_numel)
                self._sums_used = streams.event()
            self._sums_used.wait(stream)  # earlier backwards may have packed on another one
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
        streams: Streams,
        divisor: float,
        *,
        accumulate: bool = False,
        zero_copy: bool = False,
    ) -> list[torch.Tensor]:
        """Writes what has been collected, the sums with it, and the tail, into the chunks of all
        ranks; lets the gradients go.

        `target` is 1-D, in a slot or the gradient shard; the tail says what was `touched`. With
        `zero_copy`, `divisor` is 1 and zero-copy parameters are left out.

        Returns:
            The gradients of zero-copy parameters, 1-D in the gather dtype, zeros where none has
            arrived, to be read until the slot is released.

        Streams: the pack stream, after every producer.
        """
        stream, layout, tail = self.pack_stream, self.layout, self._tail(touched)
        used = self._sums_used if self.summed else None
        if used is not None and self.count:
            self.add_up(streams)
        self.wait_for_producers()
        with streams.on(stream):  # nothing here requires grad, so there is nothing to switch off
            if used is None:
                grads = self._contiguous()
            else:
                used.wait(stream)
                grads = self.layout.whole.local_views(self.sums, 0)
            sent_alone = []
            if zero_copy:
                for i in layout.zero_copy:
                    # The next backward may write to the sums before they are sent.
                    flat = self._flat(grads[i], layout.pieces[i], copies=used is not None)
                    sent_alone.append(flat)
                grads = [grads[i] for i in layout.others]
                layout = layout.packed
            self._fill(grads, tail, target, layout, divisor, accumulate=accumulate)
        if used is not None:
            used.record(stream)
            self.summed = ()
        self._let_go(streams)
        return sent_alone

    def _contiguous(self) -> list[torch.Tensor]:
        """Returns this rank's part of each gradient as the pack reads it; an empty tensor where
        none is.
        """
        found = []
        for i, grad in enumerate(self.gradients):
            if grad is None:
                # `ops.pack` writes zeros in its place: other ranks may have a gradient to add to.
                found.append(self._nothing)
                continue
            if self.group.holds_dtensors:
                grad = self.params[i].sharding.local_gradient(grad)
            found.append(grad.contiguous())
        return found

    def _flat(self, grad: torch.Tensor, piece: Piece, *, copies: bool) -> torch.Tensor:
        """Returns a gradient as it is sent by itself."""
        if not grad.numel():
            return grad.new_zeros(piece.numel, dtype=self._nothing.dtype)
        return grad.to(self._nothing.dtype, copy=copies).view(-1)

    def _fill(
        self,
        grads: list[torch.Tensor],
        tail: torch.Tensor,
        target: torch.Tensor,
        layout: ShardLayout,
        divisor: float,
        *,
        accumulate: bool,
    ) -> None:
        table, chunk_numel = layout.table_with_tail, layout.chunk_numel
        rows = grads
        # What is cut along an inner dim has gaps, which the table of `ops.pack` cannot say.
        if layout.strided:
            from shardgrad.sharding.strided_pack import pack_strided

            pack_strided(grads, target, layout, divisor=divisor)
            rows = [grad for i, grad in enumerate(grads) if i not in layout.strided]
        rows = [*rows, tail]
        if self._second is not None:
            rows, table, chunk_numel = self._second.arrange(rows, table, chunk_numel)
        ops.pack(
            rows, target, table, chunk_numel=chunk_numel, divisor=divisor, accumulate=accumulate
        )

    def _tail(self, flags: tuple[bool, ...]) -> torch.Tensor:
        """Returns what is packed behind the parameters, for each rank; one launch with usual
        gradients. Groups that are alike share it: it has 128 bytes for each rank.
        """
        place = self.pack_stream, flags
        tail = self.tails.get(place)
        if tail is None:
            mesh, numel = self.group.mesh, self.layout.tail_numel
            dtype = self._nothing.dtype if self._nothing.is_floating_point() else torch.float32
            shared = _tails.setdefault(mesh.shard_group, WeakValueDictionary())
            key = flags, numel, dtype, mesh.device
            tail = shared.get(key)
            if tail is None:
                chunk = torch.zeros(numel, dtype=dtype)
                chunk[: len(flags)] = torch.tensor(flags, dtype=dtype)
                # One copy from the host for each pattern of flags, of which a training run has few.
                tail = shared[key] = chunk.repeat(mesh.shard_size).to(mesh.device)
            self.tails[place] = tail
            # Another group may have made it on another stream, and the last one drops it.
            keep_for_current_stream(tail)
        return tail

    # -- reducing

    def _route_under(self, comm_ctx: CommContext) -> ReduceRoute:
        """Returns how the gradients travel, worked out again where something about that was
        changed.
        """
        # Each step asks for each group, so the answer is kept until one of these is another.
        group = self.group
        made_for = comm_ctx, group.collectives, self.divide_factor, group.reduce_tag
        if self._made_for != made_for:
            self._made_for = made_for
            self._route = reduce_route(
                group, self.params, self.layout, self._second, self.divide_factor, comm_ctx
            )
        return self._route

    def launch(self, comm_ctx: CommContext, *, all_reduces: bool) -> Reduction:
        """Packs what has been collected and starts the reduce-scatter; without `all_reduces`,
        HSDP stops after it and keeps a partial sum.

        Streams: the pack runs on the pack stream, after the slot is free and after every foreign
        producer; the collective runs on the reduce stream, after every writer of the slot; a second
        step, and what writes the gradient shard or a partial sum, on the stream of second steps if
        there is one. Without anything to send, the pack stream alone is used.
        """
        streams = comm_ctx.streams
        if self.count == 0:
            # No gradient has brought the pack stream of a forward into this backward's order.
            self.pack_stream = streams.current()
        route = self._route_under(comm_ctx)
        shard = None  # without the second step, only a partial sum is left
        if all_reduces or self._second is None:
            shard = self.require_shard()
        reduction = Reduction(
            route=route,
            shard=shard,
            touched=self.touched(),
            has_sums=bool(self.summed),
            partial=self.partial,
            reader=streams.current(),
            pack_stream=self.pack_stream,
            end=route.end,
        )
        with span("post_backward_reduce", self.group.name):
            if route.is_local:
                # The pack writes the gradient shard itself. It comes after the former reduction,
                # which may have ended on another pack stream.
                reduction.end = self.pack_stream
                route.done.wait(reduction.end)
                reduction.write = partial(self.pack, reduction.touched, streams=streams)
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

    def _send(self, route: ReduceRoute, reduction: Reduction) -> None:
        """Packs the gradients into a message, except those that are sent from where they are, and
        starts the reduce-scatter.
        """
        streams, transport = route.comm_ctx.streams, route.transport
        is_whole = len(route.messages) > 1
        pack_stream, producers = self.pack_stream, (self.pack_stream, *self._foreign)
        with streams.on(pack_stream):  # slots are allocated for it
            slot, (send, own, room, staging, *receive) = route.ring.take(route.sizes, pack_stream)
            lent = self.pack(
                reduction.touched, send.whole, streams, route.before, zero_copy=is_whole
            )
        sent = [send]
        if is_whole:
            slot.lend(lent, producers)
            sent += [Chunks(gradient, transport.size) for gradient in lent]
        if is_whole and not transport.receive_chunks:
            # A transport that needs no room adds up in this rank's chunk, and only reads.
            receive = [Chunks(own.whole.narrow(0, *place), 1) for *place, _ in route.messages]
        works = []
        slot.ready.record(pack_stream)
        with streams.on(streams.reduce):
            slot.ready.wait(streams.reduce)
            # NCCL makes one launch of them; elsewhere they follow each other.
            with transport.together() if is_whole else NOTHING:
                for message, chunks, place in zip(route.messages, sent, receive, strict=True):
                    begin, numel, tag = message
                    works.append((begin, numel, transport.reduce_scatter(chunks, place, tag)))
        if route.second is not None:
            # What follows the reduce-scatter has a stream of its own, so that the next group's
            # reduce-scatter does not wait for it.
            route.done.record(streams.reduce)
            route.done.wait(route.end)
        reduction.works, reduction.slot, slot.holder = works, slot, reduction
        reduction.own = own.whole if own.count else send.part(transport.rank)
        reduction.room, reduction.staging = room, staging.whole if staging.count else None

    def abandon_backward(self) -> bool:
        """Drops what a failed backward has not sent; returns whether what earlier ones left goes
        with it.
        """
        was_summed = self.state is GradState.SENT and self.is_due
        # This backward was added to earlier ones, and its part cannot be taken out again.
        self._drop_collected()
        if was_summed:
            self.is_due = False
            self.summed = ()
        return was_summed

    def move(self, state: GradState) -> None:
        """Goes on to a state; a RuntimeError if it is not in `TRANSITIONS`."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(
                f"gradients of {self.group.where}: no way from {self.state} to {state}"
            )
        if state is GradState.IDLE:  # autograd has joined its streams
            self._pack_streams.clear()
            self.waits_for_unit = False
        self.state = state


@outside_graphs
def _collect(owner: weakref.ref[GradGroup], unsharded: torch.Tensor) -> None:
    """Takes a gradient from autograd, on the stream of the parameter's AccumulateGrad node.

    The hook does not keep its owner alive: the garbage collector cannot look into hooks.
    """
    grads, grad = owner(), unsharded.grad
    if grads is None or grad is None or grads.scheduler is None:
        return
    # Where it is frozen, autograd has added nothing: what is there has been set by the program.
    if not unsharded.requires_grad:
        return
    scheduler = grads.scheduler
    # The scheduler has to know of the first gradient, with which a backward begins, and of the last
    # of each group; the calls for all others would cost more than what they do.
    is_last = grads.take(unsharded, grad, scheduler.comm_ctx.streams)
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
        self.keeps_graph = False
        self._entered: list[GradGroup] = []
        self._queue: list[GradGroup] = []  # the last is reduced first
        self.in_flight: list[Reduction] = []  # of backwards that are complete
        self._launched: list[tuple[GradGroup, Reduction]] = []  # by the backward that is running
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

    def begin_backward(self, *, in_autograd: bool) -> None:
        """Fixes the order of this backward's reductions, once; `in_autograd` says that a hook
        calls.
        """
        if self.backward_running:
            return
        self.backward_running = True
        # Grad mode is on in hooks if backward makes a graph; one that it was itself made of may be
        # kept.
        self.keeps_graph = in_autograd and (
            torch.is_grad_enabled() or (self.reads_again and _keeps_graph())
        )
        self.reads_again |= self.keeps_graph
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
        if grads.count == len(grads.params) and not grads.waits_for_unit:
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
        # Zero-bubble schedules write gradients of unsharded parameters without autograd's hook.
        grads.collect_written(self.comm_ctx.streams)
        if self._reduces_now(grads):
            reduction = grads.launch(self.comm_ctx, all_reduces=grads.requires_all_reduce)
            self._launched.append((grads, reduction))
            grads.move(GradState.SENT)
            # Gradients that are sent from where they are stay in memory until they are sent.
            if len(self._launched) > 1:
                self._return_lent(self._launched[-2][1], reduction)
        else:
            # On this rank even if it has no gradient: others may have one.
            grads.is_due = True
            if grads.count:
                grads.add_up(self.comm_ctx.streams)
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
        for reduction in self.in_flight:
            reduction.start_second_step()  # which leaves a partial sum, or takes it along
        for grads in groups:
            # Gradients that came without the unit entering forward, for example through unshard()
            # by hand, that the program has written, and what earlier backwards have left.
            waits = grads.is_due or (grads.partial.is_live and not grads.is_reduced)
            grads.collect_written(self.comm_ctx.streams)
            if grads.count or waits:
                if self.enrolment is not None:
                    self.enrolment.refuse_late(grads)
                self._reduce(grads)
            if grads.state is not GradState.IDLE:
                grads.move(GradState.IDLE)
        self.backward_running = False
        # Whether they are over is asked by `join`, or by the reduction that needs their slots.
        self.in_flight += [reduction for _, reduction in self._launched]
        self._launched = []
        if wait:
            self.join()

    def join(self) -> None:
        """Completes every reduction in flight; the current stream waits for the gradients."""
        # All second steps are launched before the first is waited for, so that they overlap.
        for reduction in self.in_flight:
            reduction.start_second_step()
        stream = self.comm_ctx.streams.current()
        for reduction in self.in_flight:
            reduction.join(stream)
        self.in_flight = []
        for ring in self.comm_ctx.rings:
            ring.rewind(stream)

    def finish(self, grads: GradGroup) -> None:
        """Reduces what waits in a group, and completes every reduction in flight.

        Called where all ranks change the group's places: what waits was packed for those of before.
        """
        # A forward calls, which may be an evaluation in inference mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            if grads.is_due or grads.partial.is_live:
                self.in_flight.append(grads.launch(self.comm_ctx, all_reduces=True))
            self.join()

    def inherit(self, other: ReductionScheduler) -> None:
        """Takes over the groups that entered under another root, and are under this one now."""
        # Units that the new root does not contain keep the root they had.
        self._entered += [grads for grads in other._entered if grads.scheduler is self]
        other._entered = [grads for grads in other._entered if grads.scheduler is not self]
        self.in_flight += other.in_flight
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
        for reduction in [*self.in_flight, *(reduction for _, reduction in self._launched)]:
            reduction.abandon()
        self.in_flight, self._launched = [], []
        self._entered.clear()
        self.abandon_backward(groups)
        for ring in self.comm_ctx.rings:
            ring.rewind()
