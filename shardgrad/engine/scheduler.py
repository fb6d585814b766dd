"""Reductions: when a group's gradients are complete, whom to wait for, where they go, and in which order.

[Note: Order of reductions]
The sequence of collectives must not depend on the data, or ranks that use different parameters would pair
up the wrong ones. Groups are therefore reduced in the reverse of the order in which their units entered
forward, each exactly once, whether or not it got gradients: a group that is complete early waits for its
predecessors, one that got nothing sends zeros. Sizes are fixed by the layout.

[Note: Touched flags]
Behind the parameters each chunk has one element per parameter: 1 from a rank that had a gradient for it,
else 0. They are summed along with the gradients, so every rank learns, at no extra message, which
parameters were touched anywhere: the others keep `grad = None` instead of turning into zeros, which an
optimizer with weight decay would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import MethodType
from typing import Any

import torch

from shardgrad.engine.buffers import Chunks, Slot
from shardgrad.engine.comm_context import Runtime
from shardgrad.engine.grad_collector import Arrivals
from shardgrad.engine.grad_packer import Packer
from shardgrad.engine.message_tag import Label
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.reduction import OVERFLOWING, Message, PartialSum, Reduction
from shardgrad.engine.trace import span
from shardgrad.errors import ParticipationError
from shardgrad.features.custom_comms import Route
from shardgrad.features.hfsdp import OuterScatter

__all__ = ["GroupReducer", "ReductionScheduler"]


# What `GroupReducer.state` reads, at every replay of a graph.
_SETTINGS = attrgetter("requires_sync", "requires_all_reduce", "divide_factor")
_WAITING = attrgetter("deferred", "_accumulating", "_partial.is_live")


class GroupReducer:
    """Collects one group's gradients and turns them into its gradient shard.

    Attributes:
        requires_sync: False keeps gradients on this rank, summed in a buffer of the reduce dtype.
        requires_all_reduce: False (HSDP) stops after the reduce-scatter and keeps the partial sum.
        divide_factor: what the sum over ranks is divided by; None for their number.
        deferred: a backward without synchronisation came by; its gradients, if any, are still due.
        last_touched: per trainable parameter, whether this rank had a gradient in the last reduction.
    """

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.requires_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.last_touched: tuple[bool, ...] = ()
        self.bound_in_this_backward = False
        self.arrivals = Arrivals()
        self._accumulator: Slot | None = None
        self._accumulating = False
        self.deferred = False
        self._partial = PartialSum()
        levels = group.mesh.levels
        self._outer = None if levels is None else OuterScatter(levels)
        self._packer = Packer(group, self.arrivals, self._outer)
        self.scheduler: ReductionScheduler
        group.on_new_unsharded = self.attach
        self.forget()

    @property
    def state(self) -> tuple[Any, ...]:
        """What the host decides by between backwards, hashable: settings, and what waits to be reduced."""
        return (*_SETTINGS(self), *_WAITING(self), *self._touched)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.requires_sync, self.requires_all_reduce, self.divide_factor, *waiting = state
        self.deferred, self._accumulating, self._partial.is_live, *self._touched = waiting

    def follow(self, other: GroupReducer) -> None:
        """Takes over what a program has set, which is the same for all groups of a unit."""
        self.requires_sync, self.requires_all_reduce, self.divide_factor = _SETTINGS(other)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the memory in which sums wait for a later backward, by kind."""
        found: dict[str, torch.Tensor] = {}
        if self._accumulator is not None and self._accumulating:
            found["sum of unreduced gradients"] = self._accumulator_chunks()[1].whole
        if self._partial.live is not None:
            found["partial sum of gradients"] = self._partial.live
        return found

    def memory(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yields what reductions keep from step to step, with its owner."""
        if self._accumulator is not None:
            yield "unreduced gradients", self._accumulator.storage
        if self._partial.live is not None:
            yield "unreduced gradients", self._partial.live.untyped_storage()
        for tail in self._packer.tails.values():
            yield "tails", tail.untyped_storage()

    def forget(self) -> None:
        """Drops everything that has arrived and not been reduced."""
        self.arrivals.forget()
        self._touched = [False] * len(self.group.trainable())
        self._accumulating = False
        self.deferred = False
        self._partial.is_live = False

    def attach(self) -> None:
        """Starts over with the group's trainable parameters and hooks those that are new."""
        self.forget()
        self._packer.start_over()
        trainable = self.group.trainable()
        self.arrivals.expect(trainable, MethodType(GroupReducer._arrive, self))
        self._direct_labels = [Label.unseen(f"reduce-scatter of {p.name}") for p in trainable]

    def _arrive(self, unsharded: torch.Tensor) -> None:
        """Takes a gradient from autograd. Runs on the stream of the parameter's AccumulateGrad node."""
        if self.arrivals.take(unsharded, self.scheduler.runtime.streams):
            self.scheduler.arrived(self)

    @property
    def due(self) -> bool:
        """True if something waits that a backward with the present settings has to deal with."""
        return self.arrivals.count > 0 or (self.deferred and self.reduces_now)

    @property
    def reduces_now(self) -> bool:
        """False if this backward only adds to a sum on this rank."""
        waits = self.group.stage.sums_whole and not self.scheduler.is_last_backward
        return self.requires_sync and not waits

    # -- packing ----------------------------------------------------------------------------------------

    @property
    def _factors(self) -> tuple[float, float]:
        """Returns (divisor before the reduction, divisor after it).

        Low-precision sums of many ranks overflow, so fp16 splits the factor around its square root, into
        powers of two as FSDP2 does; fp32 and bf16 divide once, where there is least to divide.
        """
        factor = self.divide_factor or float(self.group.mesh.data_parallel_size)
        if self.group.reduce_dtype not in OVERFLOWING:
            return 1.0, factor
        before = 1.0
        while factor % before == 0 and factor / before > before:
            before *= 2
        return before, factor / before

    def _pack(
        self, slot: Slot, target: torch.Tensor, *, accumulate: bool, directly: bool = False
    ) -> list[torch.Tensor]:
        """Packs what has arrived, and lets it go; see `Packer.pack`."""
        arrivals, streams = self.arrivals, self.scheduler.runtime.streams
        alone = self._packer.pack(
            slot,
            target,
            streams=streams,
            directly=directly,
            divisor=self._factors[0],
            accumulate=accumulate,
        )
        self._touched = [
            old or g is not None for old, g in zip(self._touched, arrivals.gradients, strict=True)
        ]
        arrivals.let_go(streams)
        return alone

    def accumulate(self) -> None:
        """Adds the waiting gradients to this rank's unsharded sum, without communication."""
        self.deferred = True
        if self.arrivals.count:
            slot, chunks = self._accumulator_chunks()
            if slot.holder is not None:
                slot.holder.complete()  # an earlier reduction of the accumulator is still in flight
            self._pack(slot, chunks.whole, accumulate=self._accumulating)
            self._accumulating = True

    def _accumulator_chunks(self) -> tuple[Slot, Chunks]:
        n, count = self._packer.layout.chunk_numel, self.group.mesh.shard_size
        dtype = self.group.reduce_dtype
        if self._accumulator is None:
            self._accumulator = Slot(self.scheduler.runtime.streams, self.group.mesh.device)
        self._accumulator.reserve(count * n * dtype.itemsize)
        return self._accumulator, self._accumulator.chunks(dtype, count, n)

    # -- reducing ---------------------------------------------------------------------------------------

    def launch(self) -> Reduction:
        """Packs what has arrived and starts the reduce-scatter.

        Streams: the pack runs on the home stream, after the slot is free and after every foreign producer;
        the collective runs on the reduce stream, after every writer of the slot.
        """
        group, runtime = self.group, self.scheduler.runtime
        route = group.comms.for_reduce(runtime, group.mesh.gather_group)
        ticket = self._ticket(runtime)
        messages = (
            self._messages_directly(ticket, route) if self._goes_directly else [self._message(ticket, route)]
        )
        ticket.touched = tuple(self._touched)
        reduce_stream = runtime.streams.reduce
        with span("post_backward_reduce", group.name), runtime.streams.on(reduce_stream):
            for used in ticket.slots:
                used.start_reading(reduce_stream)
            ticket.flights = [
                (each.begin, each.numel, route.transport.reduce_scatter(each.send, each.receive, each.label))
                for each in messages
            ]
            if route.transport.stream_ordered:
                ticket.complete()
        self._touched = [False] * len(self._touched)
        self.deferred = False
        return ticket

    @property
    def _goes_directly(self) -> bool:
        """Whether direct parameters travel by themselves this time; the same on every rank."""
        group = self.group
        as_they_are = group.reduce_dtype == group.gather_dtype and self._factors[0] == 1
        return (
            bool(self._packer.layout.direct)
            and as_they_are
            and not self.deferred
            and group.comms.reduces_plainly
        )

    def _message(self, ticket: Reduction, route: Route) -> Message:
        """Packs everything into one message."""
        group, (transport, ring) = self.group, route
        chunk_numel, dtype = self._packer.layout.chunk_numel, group.reduce_dtype
        # Over two levels the first step leaves as much as the outer ranks of one inner rank hold together.
        n = chunk_numel * group.mesh.shard_size // transport.size
        accumulated = self._accumulating
        if accumulated:
            self.accumulate()
            self._accumulating = False
        sent = 0 if accumulated else transport.size  # the accumulator is sent from where it is
        outer = 0 if self._outer is None else self._outer.receive_chunks(self.scheduler.runtime)
        landing = group.gradient_dtype.itemsize if group.home.is_away else 0
        taken = (sent + transport.receive_chunks) * n + outer * chunk_numel
        slot = ring.acquire(taken * dtype.itemsize + landing * chunk_numel, ticket)
        ticket.slots = [slot]
        if accumulated:
            slot.start_writing(self.scheduler.runtime.streams.reduce)
            send_slot = self._accumulator_chunks()[0]
            send = send_slot.chunks(dtype, transport.size, n)
            send_slot.holder = ticket
            ticket.slots.append(send_slot)
        else:
            send = slot.chunks(dtype, transport.size, n)
            self._pack(slot, send.whole, accumulate=False)
        receive = slot.chunks(dtype, transport.receive_chunks, n, skip=sent * n)
        if self._outer is not None:
            ticket.outer = slot.chunks(dtype, outer, chunk_numel, skip=taken - outer * chunk_numel)
        if landing:
            room = slot.chunks(group.gradient_dtype, 1, chunk_numel, behind=taken * dtype.itemsize)
            ticket.landing = room.whole
        ticket.own = send.parts[transport.rank]
        return Message(0, send, receive, group.reduce_label)

    def _messages_directly(self, ticket: Reduction, route: Route) -> list[Message]:
        """Packs the parameters that are not direct; the gradients of the others are sent from where they are.

        The slot has room for the packed message, for this rank's chunk, and for what the transport receives.
        """
        layout, dtype, (transport, ring) = self._packer.layout, self.group.reduce_dtype, route
        n, packed_numel, received = layout.chunk_numel, layout.packed.chunk_numel, transport.receive_chunks
        sent = transport.size * packed_numel
        slot = ring.acquire((sent + (1 + received) * n) * dtype.itemsize, ticket)
        ticket.slots = [slot]
        packed = slot.chunks(dtype, transport.size, packed_numel)
        gradients = self._pack(slot, packed.whole, accumulate=False, directly=True)
        ticket.own = slot.chunks(dtype, 1, n, skip=sent).whole

        def message(begin: int, numel: int, send: Chunks, label: Label) -> Message:
            # A transport that needs no room of its own adds up in this rank's chunk, and only reads.
            skip = sent + begin if not received else sent + n + received * begin
            return Message(begin, send, slot.chunks(dtype, received or 1, numel, skip=skip), label)

        messages = [message(layout.packed_offset, packed_numel, packed, self.group.reduce_label)]
        for i, gradient in zip(layout.direct, gradients, strict=True):
            piece, numel = layout.pieces[i], layout.pieces[i].shard_numel
            send = Chunks(gradient, gradient.split(numel))
            messages.append(message(piece.shard_offset, numel, send, self._direct_labels[i]))
        return messages

    def _ticket(self, runtime: Runtime) -> Reduction:
        return Reduction(
            self.group,
            runtime,
            divisor=self._factors[1],
            partial=self._partial,
            outer=self._outer,
            crosses=self.requires_all_reduce,
            bound=self._bound,
        )

    def _bound(self, touched: tuple[bool, ...]) -> None:
        self.bound_in_this_backward = True
        self.last_touched = touched

    def abandon(self) -> None:
        """Drops everything of an iteration that failed; gradients it wrote become None."""
        self.forget()
        if self.bound_in_this_backward:
            self.group.gradients().unbind()
            self.bound_in_this_backward = False


class ReductionScheduler:
    """Decides the order of reductions under one root. See [Note: Order of reductions].

    Args:
        runtime: shared with the units.
        end_backward: called once when autograd has finished a backward that this scheduler saw begin.

    Attributes:
        backward_running: between the first gradient of a backward and its end.
        is_last_backward: False for a micro-batch that others follow.
    """

    def __init__(self, runtime: Runtime, end_backward: Callable[[], None]) -> None:
        self.runtime = runtime
        self._end_backward = end_backward
        self.backward_running = False
        self.is_last_backward = True
        self._entered: dict[GroupReducer, None] = {}
        self._queue: list[GroupReducer] = []
        self._expected: set[GroupReducer] = set()
        self._closed: set[GroupReducer] = set()
        self._tickets: list[Reduction] = []
        self._enrolled: list[GroupReducer] | None = None
        self._enrolment_used = False

    def enter(self, reducer: GroupReducer) -> None:
        """Notes that a unit entered forward with gradients on; its group will be reduced in this backward."""
        if self.backward_running:
            self.expect(reducer)
        else:
            self._entered[reducer] = None

    def expect(self, reducer: GroupReducer) -> None:
        """Adds a group that backward has come to although it was not queued: it is the next to finish.

        Reentrant checkpointing runs a unit's forward inside backward; a second backward through a kept
        graph comes without a forward.
        """
        if reducer not in self._expected:
            self._expected.add(reducer)
            self._queue.append(reducer)

    def enroll(self, everyone: Iterable[GroupReducer] | None) -> None:
        """Makes the next backward, and no further one, reduce exactly these groups, entered or not.

        None ends the enrolment. See [Note: Participation].
        """
        self._enrolled = None if everyone is None else [r for r in everyone if r.group.trainable()]
        self._enrolment_used = False

    @property
    def has_enrolled(self) -> bool:
        """True if an enrolled backward is still to come."""
        return bool(self._enrolled) and not self._enrolment_used

    def begin_backward(self, *, in_autograd: bool) -> None:
        """Fixes the order of this backward's reductions; does nothing if it has begun already.

        Args:
            in_autograd: called from a hook, so that autograd can be asked to call back at its end.
        """
        if self.backward_running:
            return
        self.backward_running = True
        if in_autograd:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._queue = list(self._entered)
        self._closed.clear()
        if self._enrolled is not None:
            if self._enrolment_used:
                raise ParticipationError(
                    "a second backward inside one participate()",
                    expected="at most one forward and one backward",
                    got="another backward, which the other ranks would not join",
                    fix="one `with shardgrad.participate(model):` for each micro-batch",
                )
            self._enrolment_used = True
            self._queue = list(self._enrolled)
            self._closed.update(r for r in self._queue if r not in self._entered)
        self._entered.clear()
        self._expected = set(self._queue)
        for reducer in self._queue:
            reducer.bound_in_this_backward = False

    def arrived(self, reducer: GroupReducer) -> None:
        """A gradient came in; reduces what has become possible."""
        if not self.backward_running:
            self.begin_backward(in_autograd=True)
        if reducer.arrivals.complete:
            self.close(reducer)

    def close(self, reducer: GroupReducer) -> None:
        """Says that no more gradients are expected for this group; reduces what has become possible."""
        self._closed.add(reducer)
        self.reduce_ready()

    def reduce_ready(self) -> None:
        """Reduces, in order, the groups at the head of the queue that expect no more gradients."""
        while self._queue and self._queue[-1] in self._closed:
            self._reduce(self._queue.pop())

    def _reduce(self, reducer: GroupReducer) -> None:
        self._closed.discard(reducer)
        if reducer.reduces_now:
            self._tickets.append(reducer.launch())
        else:
            reducer.accumulate()

    def drain(self, everyone: Iterable[GroupReducer], *, wait: bool) -> None:
        """Ends a backward: reduces all that is left, then makes the current stream wait for the gradients.

        Args:
            everyone: all reducers under the root, in construction order.
            wait: False leaves reductions in flight, for a backward that is not the last one.
        """
        while self._queue:
            self._reduce(self._queue.pop())
        # Gradients that came without the unit entering forward, for example through unshard() by hand.
        for reducer in everyone:
            if reducer.due:
                self._reduce(reducer)
        self._closed.clear()
        self.backward_running = False
        if wait:
            self.join()

    def join(self) -> None:
        """Completes every reduction in flight; the current stream waits for the gradients."""
        for ticket in self._tickets:
            ticket.land()
        stream = self.runtime.streams.current()
        for ticket in self._tickets:
            ticket.join(stream)
        self._tickets.clear()
        self.runtime.rewind()

    def inherit(self, other: ReductionScheduler) -> None:
        """Takes over the groups that entered under an inner unit before its root first ran."""
        for reducer in other._entered:
            reducer.scheduler = self
            self._entered[reducer] = None
        self._tickets.extend(other._tickets)

    def abandon(self, everyone: Iterable[GroupReducer]) -> None:
        """Forgets a failed iteration; waits for what is in flight, drops what it brought."""
        self._queue.clear()
        self._entered.clear()
        self._closed.clear()
        self._enrolled = None
        self.backward_running = False
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.abandon()
        for reducer in everyone:
            reducer.abandon()
