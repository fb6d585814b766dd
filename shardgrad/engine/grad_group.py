"""One owner for a group's gradients: how they are collected, packed and reduced, and where they end up.

[Note: Touched flags]
Behind the parameters each chunk has one element per parameter: 1 from a rank that had a gradient for it,
else 0. They are summed along with the gradients, so every rank learns, at no extra message, which
parameters were touched anywhere: the others keep `grad = None` instead of turning into zeros, which an
optimizer with weight decay would notice.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from operator import attrgetter
from types import MethodType
from typing import Any, Protocol

import torch

from shardgrad.engine.buffers import Chunks, Slot
from shardgrad.engine.comm_context import CommContext, Route
from shardgrad.engine.grad_collector import GradCollector
from shardgrad.engine.grad_packer import GradPacker
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.message_tag import MessageTag
from shardgrad.engine.param import FSDPParam
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.reduction import OVERFLOWING, Message, PartialSum, Reduction
from shardgrad.engine.streams import Stream
from shardgrad.engine.trace import span
from shardgrad.features.hfsdp import OuterScatter
from shardgrad.sharding.layout import ShardLayout

__all__ = ["GradGroup", "grads_of"]

# By the group's id; the GradGroup keeps the group alive.
_of: weakref.WeakValueDictionary[int, GradGroup] = weakref.WeakValueDictionary()


def grads_of(group: ParamGroup) -> GradGroup:
    """Returns the owner of a group's gradients."""
    return _of[id(group)]


# What `GradGroup.state` reads, at every replay of a graph.
_SETTINGS = attrgetter("requires_sync", "requires_all_reduce", "divide_factor")
_WAITING = attrgetter("deferred", "_accumulating", "_partial.is_live")


class Scheduler(Protocol):
    """What a group's gradients ask of the order of reductions."""

    runtime: CommContext
    is_last_backward: bool

    def arrived(self, grads: GradGroup) -> None:
        """A gradient came in."""


class GradGroup:
    """Collects one group's gradients and turns them into its gradient shard.

    Attributes:
        requires_sync: False keeps gradients on this rank, summed in a buffer of the reduce dtype.
        requires_all_reduce: False (HSDP) stops after the reduce-scatter and keeps the partial sum.
        divide_factor: what the sum over ranks is divided by; None for their number.
        deferred: a backward without synchronisation came by; its gradients, if any, are still due.
        last_touched: per trainable parameter, whether this rank had a gradient in the last reduction.
        params: those that required grad when `refresh_trainable` last looked, in order.
        layout: their places in a chunk, with a tail; None before the first `refresh_trainable`.
    """

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.requires_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.last_touched: tuple[bool, ...] = ()
        self.bound_in_this_backward = False
        self.collector = GradCollector()
        self._accumulator: Slot | None = None
        self._accumulating = False
        self.deferred = False
        self._partial = PartialSum()
        levels = group.mesh.levels
        self._outer = None if levels is None else OuterScatter(levels)
        self._packer = GradPacker(group, self.collector, self._outer)
        self.scheduler: Scheduler
        self.layout: ShardLayout | None = None
        self.params: list[FSDPParam] = []
        self._trainable: tuple[bool, ...] = ()
        self._generation = group.generation
        self._hooked: object = None
        self._shard: GradShard | None = None
        self.forget()
        _of[id(group)] = self

    @property
    def state(self) -> tuple[Any, ...]:
        """What the host decides by between backwards, hashable: settings, and what waits to be reduced."""
        return (*_SETTINGS(self), *_WAITING(self), *self._touched)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.requires_sync, self.requires_all_reduce, self.divide_factor, *waiting = state
        self.deferred, self._accumulating, self._partial.is_live, *self._touched = waiting

    def follow(self, other: GradGroup) -> None:
        """Takes over what a program has set, which is the same for all groups of a unit."""
        self.requires_sync, self.requires_all_reduce, self.divide_factor = _SETTINGS(other)

    # -- trainability and the gradient shard ------------------------------------------------------------

    def refresh_trainable(self) -> bool:
        """Takes note of which parameters require grad; True if that changed since the last call.

        A program may have frozen an unsharded parameter, as a forward left it; that is meant for the sharded
        one.
        """
        params = self.group.params
        known = self._trainable if self._generation == self.group.generation else ()
        for p, was in zip(params, known, strict=False):
            if p.unsharded is not None and p.unsharded.requires_grad != was:
                p.sharded.requires_grad_(not was)
        now = tuple(p.sharded.requires_grad for p in params)
        if now == known and self.layout is not None:
            return False
        self._trainable, self._generation = now, self.group.generation
        self._shard = None
        self.params = [p for p in params if p.sharded.requires_grad]
        self.layout = self.group.layout_of(self.params, with_flags=True)
        for p in params:
            if p.unsharded is not None:
                p.unsharded.requires_grad_(p.sharded.requires_grad)
        self._attach()
        return True

    @property
    def shard(self) -> GradShard | None:
        """The gradient shard; None before the first reduction, and after parameters were replaced."""
        return self._shard if self._generation == self.group.generation else None

    def require_shard(self) -> GradShard:
        """Returns the gradient shard, allocating it at the first call."""
        shard = self.shard
        if shard is None:
            if self.layout is None or self._generation != self.group.generation:
                self.refresh_trainable()
            group = self.group
            shard = self._shard = GradShard(
                [p.sharded for p in self.params],
                self._packer.layout,
                group.mesh,
                group.gradient_dtype,
                group.gradient_policy,
                group.shard_memory,
            )
        return shard

    def unsharded_for(self, stream: Stream) -> None:
        """Takes note that the parameters were unsharded for `stream`; hooks them if they are new objects."""
        if self._hooked is not self.group.params[0].unsharded:
            self._attach()
        self.collector.home = stream

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the memory in which sums wait for a later backward, by kind."""
        found: dict[str, torch.Tensor] = {}
        if self._accumulator is not None and self._accumulating:
            found["sum of unreduced gradients"] = self._accumulator_chunks()[1].whole
        if self._partial.live is not None:
            found["partial sum of gradients"] = self._partial.live
        return found

    def memory(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yields what is kept of gradients from step to step, with its owner."""
        if self._shard is not None:
            yield "gradients", self._shard.flat.untyped_storage()
        if self._accumulator is not None:
            yield "unreduced gradients", self._accumulator.storage
        if self._partial.live is not None:
            yield "unreduced gradients", self._partial.live.untyped_storage()
        for tail in self._packer.tails.values():
            yield "tails", tail.untyped_storage()

    def forget(self) -> None:
        """Drops everything that has arrived and not been reduced."""
        self.collector.forget()
        self._touched = [False] * len(self.params)
        self._accumulating = False
        self.deferred = False
        self._partial.is_live = False

    def _attach(self) -> None:
        """Starts over with the group's trainable parameters and hooks those that are new."""
        self.forget()
        self._packer.start_over(self.params, self.layout)
        self._hooked = self.group.params[0].unsharded
        self.collector.expect(self.params, MethodType(GradGroup._arrive, self))
        self._direct_labels = [MessageTag.unseen(f"reduce-scatter of {p.name}") for p in self.params]

    def _arrive(self, unsharded: torch.Tensor) -> None:
        """Takes a gradient from autograd. Runs on the stream of the parameter's AccumulateGrad node."""
        if self.collector.take(unsharded, self.scheduler.runtime.streams):
            self.scheduler.arrived(self)

    @property
    def due(self) -> bool:
        """True if something waits that a backward with the present settings has to deal with."""
        return self.collector.count > 0 or (self.deferred and self.reduces_now)

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
        """Packs what has arrived, and lets it go; see `GradPacker.pack`."""
        collector, streams = self.collector, self.scheduler.runtime.streams
        alone = self._packer.pack(
            slot,
            target,
            streams=streams,
            directly=directly,
            divisor=self._factors[0],
            accumulate=accumulate,
        )
        self._touched = [
            old or g is not None for old, g in zip(self._touched, collector.gradients, strict=True)
        ]
        collector.let_go(streams)
        return alone

    def accumulate(self) -> None:
        """Adds the waiting gradients to this rank's unsharded sum, without communication."""
        self.deferred = True
        if self.collector.count:
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
        route = group.collectives.for_reduce(runtime, group.mesh.gather_group)
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
            bool(self._packer.layout.zero_copy)
            and as_they_are
            and not self.deferred
            and group.collectives.reduces_plainly
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
        landing = group.gradient_dtype.itemsize if group.shard_memory.is_offloaded else 0
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
        return Message(0, send, receive, group.reduce_tag)

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

        def message(begin: int, numel: int, send: Chunks, label: MessageTag) -> Message:
            # A transport that needs no room of its own adds up in this rank's chunk, and only reads.
            skip = sent + begin if not received else sent + n + received * begin
            return Message(begin, send, slot.chunks(dtype, received or 1, numel, skip=skip), label)

        messages = [message(layout.packed_offset, packed_numel, packed, self.group.reduce_tag)]
        for i, gradient in zip(layout.zero_copy, gradients, strict=True):
            piece, numel = layout.pieces[i], layout.pieces[i].shard_numel
            send = Chunks(gradient, gradient.split(numel))
            messages.append(message(piece.shard_offset, numel, send, self._direct_labels[i]))
        return messages

    def _ticket(self, runtime: CommContext) -> Reduction:
        return Reduction(
            self.group,
            runtime,
            divisor=self._factors[1],
            partial=self._partial,
            outer=self._outer,
            crosses=self.requires_all_reduce,
            bound=self._bound,
            shard=self.require_shard,
        )

    def _bound(self, touched: tuple[bool, ...]) -> None:
        self.bound_in_this_backward = True
        self.last_touched = touched

    def abandon(self) -> None:
        """Drops everything of an iteration that failed; gradients it wrote become None."""
        self.forget()
        if self.bound_in_this_backward:
            self.require_shard().unbind()
            self.bound_in_this_backward = False
