"""A reduction under way: from a slot of packed chunks to the average in the gradient shard.

    reduce-scatter -> (all-reduce over replicas, or outer reduce-scatter) -> (hook) -> gradient shard

Which of the steps there are is fixed by the group's mesh and settings, never by the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardgrad.engine.buffers import Chunks, Slot
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.message_tag import MessageTag
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.streams import Stream
from shardgrad.engine.summands import PendingSum
from shardgrad.engine.transports import Work
from shardgrad.features.hfsdp import OuterScatter

__all__ = ["OVERFLOWING", "Message", "PartialSum", "Reduction"]

# Sums of many ranks overflow in these, so they are divided before and after.
OVERFLOWING = (torch.float16,)


@dataclass(frozen=True)
class Message:
    """One reduce-scatter of a reduction.

    Attributes:
        begin: first element in a chunk of what is sent.
        send: to each rank.
        receive: room, as the transport needs it.
        label: of the message.
    """

    begin: int
    send: Chunks
    receive: Chunks
    label: MessageTag

    @property
    def numel(self) -> int:
        """Elements of a chunk that are sent."""
        return self.send.parts[0].numel()


class PartialSum:
    """What earlier micro-batches have left after the first step, for the second to take along.

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

    def keep(self, summands: PendingSum, like: torch.Tensor) -> None:
        """Becomes the sum of summands, itself among them if it is live."""
        if self.tensor is None:
            self.tensor = torch.empty_like(like)
        summands.add_up(self.tensor)
        self.is_live = True


class Reduction:
    """A launched reduction (a *ticket*): its slots, and how to end it.

    Args:
        group: whose gradients these are.
        runtime: of the root.
        divisor: what the sum is divided by at the end.
        partial: see there.
        outer: the second step over two levels, or None.
        crosses: False stops after the first step and keeps the partial sum.
        bound: called with `touched` once the gradients are bound.
        shard: gives the gradient shard.

    Attributes:
        touched: per trainable parameter, whether this rank had a gradient.
        slots: what is in flight lies in.
        own: this rank's chunk of the first step, and room for its sum.
        outer: what the second step of two levels receives goes there; None with one level.
        landing: room for the average, if the gradient shard lives on the host.
        flights: of the step that is under way, each behind the first element and the number of elements that
            it brings of a chunk.
    """

    touched: tuple[bool, ...]
    own: torch.Tensor
    flights: Sequence[tuple[int, int, Work]]

    def __init__(
        self,
        group: ParamGroup,
        runtime: CommContext,
        *,
        divisor: float,
        partial: PartialSum,
        outer: OuterScatter | None,
        crosses: bool,
        bound: Callable[[tuple[bool, ...]], None],
        shard: Callable[[], GradShard],
    ) -> None:
        self._group = group
        self._runtime = runtime
        self._divisor = divisor
        self._partial = partial
        self._outer = outer
        self._crosses = crosses
        self._bound = bound
        self._shard = shard
        self._done = runtime.streams.event()
        self._landed = False
        self._crossing = False
        self._completed = False
        self._summands = PendingSum([])
        self.slots: list[Slot] = []
        self.outer: Chunks | None = None
        self.landing: torch.Tensor | None = None

    def land(self) -> None:
        """Ends the first step and starts the second, if there is one.

        The host waits only if the transport is not stream-ordered.
        """
        if self._landed:
            return
        self._landed = True
        replicas = self._group.mesh.replicate_group
        self._arrive()
        if replicas is None and self._outer is None:
            return
        if self._partial.live is not None:
            self._summands = self._summands.plus(self._partial.live)
        if not self._crosses:
            self._partial.keep(self._summands, like=self.own)
            self._summands = PendingSum([])
            return
        self._summands.add_up(self.own)
        self._partial.is_live = False
        self._crossing = True
        if self._outer is not None and self.outer is not None:
            flight = self._outer.launch(self.own, self.outer, self._group.reduce_tag, self._runtime)
            self.flights = [(0, self._outer.own_part(self.own).numel(), flight)]
        elif replicas is not None:
            transport = self._runtime.transport(replicas)
            flight = transport.all_reduce(self.own, what=f"all-reduce of {self._group.name}")
            self.flights = [(0, self.own.numel(), flight)]

    def _arrive(self) -> None:
        self._summands = PendingSum([(begin, numel, flight.wait()) for begin, numel, flight in self.flights])

    def _finish(self) -> None:
        """Writes the average into the gradient shard and binds it."""
        if self._crossing:
            self._arrive()
        if not self._summands:
            return  # the second step is deferred: the gradients stay None
        summands, divisor = self._summands, self._divisor
        if self._group.collectives.hook is not None:
            summands, divisor = self._through_hook()
        gradients, landing = self._shard(), self.landing
        accumulate = gradients.prepare()
        if landing is not None and accumulate:
            landing.copy_(gradients.flat, non_blocking=True)
        out = gradients.flat if landing is None else landing
        summands.add_up(out, divisor=divisor, accumulate=accumulate)
        if landing is not None:
            gradients.bring(landing, self._runtime.streams)
        gradients.bind(self.touched)
        self._bound(self.touched)

    def _through_hook(self) -> tuple[PendingSum, float]:
        """Shows the result to the program's all-reduce hook, as FSDP2 does.

        It sees the average, unless the average is taken last: in float16, or if only sums are allowed.

        Returns:
            The summands to go on with, and what their sum is still to be divided by.
        """
        comms, streams = self._group.collectives, self._runtime.streams
        last = comms.only_sums or self._group.reduce_dtype in OVERFLOWING
        out = self.own if self._outer is None else self._outer.own_part(self.own)
        self._summands.add_up(out, divisor=1.0 if last else self._divisor)
        current = streams.current()
        place = comms.hook_stream or current
        self._done.record(current)
        self._done.wait(place)
        with streams.on(place):
            # What lies behind the gradients is the engine's.
            comms.hook(out.narrow(0, 0, self._tail_offset))
        self._done.record(place)
        self._done.wait(current)
        return PendingSum([(0, out.numel(), [out])]), self._divisor if last else 1.0

    @property
    def _tail_offset(self) -> int:
        return self._shard().values.numel()

    def complete(self) -> None:
        """Ends the reduction: the gradients are bound, and its slots are free once the device gets there."""
        if self._completed:
            return
        streams = self._runtime.streams
        with torch.no_grad():
            self.land()
            self._finish()
        self._completed = True
        self._release(streams.reduce)
        self._done.record(streams.reduce)

    def join(self, stream: Stream) -> None:
        """Completes, and makes `stream` wait for the gradients, or the host if they come to it."""
        self.complete()
        self._done.wait(stream)
        if self.landing is not None:
            self._shard().arrive()

    def abandon(self) -> None:
        """Waits for the transport and drops the result."""
        if self._completed:
            return
        self._completed = True
        try:
            self._arrive()
        finally:
            self._release(self._runtime.streams.reduce)

    def _release(self, stream: Stream) -> None:
        for slot in self.slots:
            slot.release(stream)
