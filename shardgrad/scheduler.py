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

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch

from . import ops
from .arrivals import Arrivals
from .buffers import Chunks, Slot
from .collectives import Flight
from .crosswise import pack_crosswise
from .errors import ParticipationError
from .labels import LABEL_NUMEL
from .layout import ShardLayout
from .param_group import ParamGroup
from .runtime import Runtime
from .streams import Stream
from .trace import span

__all__ = ["GroupReducer", "ReductionScheduler"]

_OVERFLOWING = (torch.float16,)


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
        self._tails: dict[tuple[tuple[bool, ...], tuple[float, ...]], torch.Tensor] = {}
        self._accumulator: Slot | None = None
        self._accumulating = False
        self.deferred = False
        self._partial: torch.Tensor | None = None
        self._partial_live = False
        self.scheduler: ReductionScheduler
        group.on_new_unsharded = self.attach
        self.forget()

    @property
    def state(self) -> tuple[Any, ...]:
        """What the host decides by between backwards, hashable: settings, and what waits to be reduced."""
        settings = self.requires_sync, self.requires_all_reduce, self.divide_factor
        waiting = self.deferred, self._accumulating, self._partial_live, tuple(self._touched)
        return settings, waiting

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        settings, waiting = state
        self.requires_sync, self.requires_all_reduce, self.divide_factor = settings
        self.deferred, self._accumulating, self._partial_live, touched = waiting
        self._touched = list(touched)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the memory in which sums wait for a later backward, by kind."""
        found: dict[str, torch.Tensor] = {}
        if self._accumulator is not None and self._accumulating:
            found["sum of unreduced gradients"] = self._accumulator_chunks()[1].whole
        if self._partial is not None and self._partial_live:
            found["partial sum of gradients"] = self._partial
        return found

    def forget(self) -> None:
        """Drops everything that has arrived and not been reduced."""
        self.arrivals.forget()
        self._touched = [False] * len(self.group.trainable())
        self._accumulating = False
        self.deferred = False
        self._partial_live = False

    def attach(self) -> None:
        """Starts over with the group's trainable parameters and hooks those that are new."""
        self.forget()
        self._tails.clear()
        self.arrivals.expect(self.group.trainable(), MethodType(GroupReducer._arrive, self))
        self._nothing = torch.empty(0, dtype=self.group.gather_dtype, device=self.group.mesh.device)

    def _arrive(self, unsharded: torch.Tensor) -> None:
        """Takes a gradient from autograd. Runs on the stream of the parameter's AccumulateGrad node."""
        if self.arrivals.take(unsharded, self.scheduler.runtime.streams):
            self.scheduler.arrived(self)

    @property
    def due(self) -> bool:
        """True if something waits that a backward with the present settings has to deal with."""
        return self.arrivals.count > 0 or (self.deferred and self.requires_sync)

    # -- packing ----------------------------------------------------------------------------------------

    @property
    def _factors(self) -> tuple[float, float]:
        """Returns (divisor before the reduction, divisor after it).

        Low-precision sums of many ranks overflow, so fp16 splits the factor around its square root, into
        powers of two as FSDP2 does; fp32 and bf16 divide once, where there is least to divide.
        """
        factor = self.divide_factor or float(self.group.mesh.data_parallel_size)
        if self.group.reduce_dtype not in _OVERFLOWING:
            return 1.0, factor
        before = 1.0
        while factor % before == 0 and factor / before > before:
            before *= 2
        return before, factor / before

    def _pack(self, slot: Slot, target: torch.Tensor, *, accumulate: bool) -> None:
        """Writes what has arrived, and the tail, into the chunks of all ranks, and lets it go.

        Streams: the home stream, after the slot is free and after every producer; see `arrivals.py`.
        """
        arrivals, streams = self.arrivals, self.scheduler.runtime.streams
        slot.start_writing(arrivals.home)
        arrivals.wait_for_producers()
        arrived = arrivals.gradients
        if self.group.holds_dtensors:
            with streams.on(arrivals.home), torch.no_grad():
                arrived = self.group.local_gradients(arrived)
        grads = [self._nothing if g is None else g.contiguous() for g in arrived]
        layout, divisor = self._layout, self._factors[0]
        with streams.on(arrivals.home), torch.no_grad():
            straight = grads
            if layout.crosswise:
                pack_crosswise(grads, target, layout, divisor=divisor, accumulate=accumulate)
                straight = [grads[i] for i in layout.straight]
            ops.pack(
                [*straight, self._tail(labelled=not accumulate)],
                target,
                layout.table_with_tail,
                chunk_numel=layout.chunk_numel,
                divisor=divisor,
                accumulate=accumulate,
            )
        slot.finish_writing(arrivals.home)
        self._touched = [
            old or g is not None for old, g in zip(self._touched, arrivals.gradients, strict=True)
        ]
        arrivals.let_go(streams)

    def _tail(self, *, labelled: bool) -> torch.Tensor:
        """Returns this rank's flags and the label, once for each rank's chunk, in float32.

        See [Note: Touched flags] and [Note: Labels]. A tail that is added to one that has the label already
        brings none.
        """
        label = self.group.reduce_label.digits if labelled else (0.0,) * LABEL_NUMEL
        flags = tuple(grad is not None for grad in self.arrivals.gradients)
        tail = self._tails.get((flags, label))
        if tail is None:
            chunk = torch.zeros(self._layout.tail_numel, dtype=torch.float32)
            chunk[: len(flags)] = torch.tensor(flags, dtype=torch.float32)
            # The pack divides what it writes, and a label must arrive as it is.
            chunk[-LABEL_NUMEL:] = torch.tensor(label) * self._factors[0]
            tail = chunk.repeat(self.group.mesh.shard_size).to(self.group.mesh.device)
            self._tails[flags, label] = tail
        return tail

    @property
    def _layout(self) -> ShardLayout:
        layout = self.group.gradient_layout
        if layout is None:
            raise RuntimeError(f"unit {self.group.name} was never unsharded")
        return layout

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
        dtype, n, count = self.group.reduce_dtype, self._layout.chunk_numel, self.group.mesh.shard_size
        if self._accumulator is None:
            self._accumulator = Slot(self.scheduler.runtime.streams, self.group.mesh.device)
        self._accumulator.reserve(count * n * dtype.itemsize)
        return self._accumulator, self._accumulator.chunks(dtype, count, n)

    # -- reducing ---------------------------------------------------------------------------------------

    def launch(self) -> _Ticket:
        """Packs what has arrived and starts the reduce-scatter.

        Streams: the pack runs on the home stream, after the slot is free and after every foreign producer;
        the collective runs on the reduce stream, after every writer of the slot.
        """
        group, runtime = self.group, self.scheduler.runtime
        transport = runtime.transport(group.mesh.shard_group)
        n, dtype = self._layout.chunk_numel, group.reduce_dtype
        ticket = _Ticket(self)
        if self._accumulating:
            self.accumulate()
            self._accumulating = False
            send_slot, send = self._accumulator_chunks()
            slot = runtime.reduce_ring.acquire(transport.receive_chunks * n * dtype.itemsize, ticket)
            slot.start_writing(runtime.streams.reduce)
            receive = slot.chunks(dtype, transport.receive_chunks, n)
            send_slot.holder = ticket
            ticket.slots = [slot, send_slot]
        else:
            count = transport.size + transport.receive_chunks
            slot = runtime.reduce_ring.acquire(count * n * dtype.itemsize, ticket)
            send = slot.chunks(dtype, transport.size, n)
            receive = slot.chunks(dtype, transport.receive_chunks, n, skip=transport.size * n)
            ticket.slots = [slot]
            self._pack(slot, send.whole, accumulate=False)
        ticket.touched = tuple(self._touched)
        reduce_stream = runtime.streams.reduce
        with span("post_backward_reduce", group.name), runtime.streams.on(reduce_stream):
            for used in ticket.slots:
                used.start_reading(reduce_stream)
            ticket.own = send.parts[transport.rank]
            ticket.flight = transport.reduce_scatter(send, receive, group.reduce_label)
            if transport.stream_ordered:
                ticket.complete()
        self._touched = [False] * len(self._touched)
        self.deferred = False
        return ticket

    def _land(self, ticket: _Ticket) -> None:
        """Takes the reduce-scatter's result; for HSDP adds earlier partial sums and starts the all-reduce."""
        group = self.group
        ticket.chunks = ticket.flight.wait()
        if group.mesh.replicate_group is None:
            return
        own = ticket.own
        if self._partial_live and self._partial is not None:
            ticket.chunks.append(self._partial)
        if not ticket.all_reduces:
            if self._partial is None:
                self._partial = torch.empty_like(own)
            ops.sum_chunks(ticket.chunks, self._partial)
            self._partial_live = True
            ticket.chunks = []
            return
        ops.sum_chunks(ticket.chunks, own)
        self._partial_live = False
        transport = self.scheduler.runtime.transport(group.mesh.replicate_group)
        ticket.chunks = [own]
        ticket.flight = transport.all_reduce(own, what=f"all-reduce of {group.name}")
        ticket.reducing_replicas = True

    def _finish(self, ticket: _Ticket) -> None:
        """Writes the average into the gradient shard and binds it."""
        if ticket.reducing_replicas:
            ticket.chunks = ticket.flight.wait()
        if not ticket.chunks:
            return  # HSDP with the all-reduce deferred: the gradients stay None
        gradients = self.group.gradients()
        accumulate = gradients.prepare()
        ops.sum_chunks(ticket.chunks, gradients.flat, divisor=self._factors[1], accumulate=accumulate)
        gradients.bind(ticket.touched)
        self.bound_in_this_backward = True
        self.last_touched = ticket.touched

    def abandon(self) -> None:
        """Drops everything of an iteration that failed; gradients it wrote become None."""
        self.forget()
        if self.bound_in_this_backward:
            self.group.gradients().unbind()
            self.bound_in_this_backward = False


class _Ticket:
    """A launched reduction: its slots, and how to end it."""

    def __init__(self, reducer: GroupReducer) -> None:
        self._reducer = reducer
        self.touched: tuple[bool, ...] = ()
        self.all_reduces = reducer.requires_all_reduce
        self._done = reducer.scheduler.runtime.streams.mark()
        self._landed = False
        self._completed = False
        self.slots: list[Slot] = []
        self.chunks: list[torch.Tensor] = []
        self.reducing_replicas = False
        self.own: torch.Tensor
        self.flight: Flight

    def land(self) -> None:
        """Ends the reduce-scatter; the host waits only if the transport is not stream-ordered."""
        if not self._landed:
            self._landed = True
            self._reducer._land(self)

    def complete(self) -> None:
        """Ends the reduction: the gradients are bound, and its slots are free once the device gets there."""
        if self._completed:
            return
        streams = self._reducer.scheduler.runtime.streams
        with torch.no_grad():
            self.land()
            self._reducer._finish(self)
        self._completed = True
        self._release(streams.reduce)
        self._done.record(streams.reduce)

    def join(self, stream: Stream) -> None:
        """Completes, and makes `stream` wait for the gradients."""
        self.complete()
        self._done.wait(stream)

    def abandon(self) -> None:
        """Waits for the transport and drops the result."""
        if self._completed:
            return
        self._completed = True
        try:
            self.flight.wait()
        finally:
            self._release(self._reducer.scheduler.runtime.streams.reduce)

    def _release(self, stream: Stream) -> None:
        for slot in self.slots:
            slot.release(stream)


class ReductionScheduler:
    """Decides the order of reductions under one root. See [Note: Order of reductions].

    Args:
        runtime: shared with the units.
        end_backward: called once when autograd has finished a backward that this scheduler saw begin.
    """

    def __init__(self, runtime: Runtime, end_backward: Callable[[], None]) -> None:
        self.runtime = runtime
        self._end_backward = end_backward
        self.backward_running = False
        self._entered: dict[GroupReducer, None] = {}
        self._queue: list[GroupReducer] = []
        self._expected: set[GroupReducer] = set()
        self._closed: set[GroupReducer] = set()
        self._tickets: list[_Ticket] = []
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
        if reducer.requires_sync:
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
        self.runtime.reduce_ring.rewind()
        self.runtime.gather_ring.rewind()

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
