"""Gradients on their way from autograd to a slot.

[Note: Producer streams]
Autograd runs a parameter's hook on the stream its AccumulateGrad node was created on, which is whatever
stream was current when the parameter was first used. A gradient that arrives on another stream than the one
the unit was unsharded on (the *pack stream*) leaves an event there; the pack stream waits for exactly these
events before it packs, and those streams wait for the pack before their gradient's memory is handed back.

[Note: Branches that send nothing back]
A unit frees its unsharded parameters when the gradients of its inputs are there. Part of its backward may be
missing in them: a branch whose input was detached sends its gradients to the parameters only. If that branch
runs on another stream, it may still read what is freed. So before memory is freed, the stream that frees it
waits for all producers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardgrad.engine.param import FSDPParam
from shardgrad.engine.streams import Stream, StreamEvent, Streams
from shardgrad.errors import GradientError

__all__ = ["GradCollector"]


class GradCollector:
    """Collects the gradients of one group in one backward.

    Attributes:
        gradients: per trainable parameter, what has arrived.
        count: parameters whose gradient has arrived.
        pack_stream: the stream the parameters were last unsharded for, on which gradients are packed.
    """

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor | None] = []
        self.count = 0
        self.pack_stream: Stream = None
        self._params: Sequence[FSDPParam] = ()
        self._index: dict[int, int] = {}
        self._foreign: dict[Stream, StreamEvent] = {}
        # Where gradients arrived or were packed on the pack stream of the time: they have left no event.
        self._pack_streams: dict[Stream, None] = {}
        self._summed: list[torch.Tensor] = []

    def expect(self, params: Sequence[FSDPParam]) -> None:
        """Starts over for these parameters, in the order of their layout."""
        self._params = params
        self._index = {id(p.unsharded): i for i, p in enumerate(params)}
        self.gradients = [None] * len(params)
        self.forget()

    def unsharded_for(self, stream: Stream) -> None:
        """Says that the parameters were unsharded for `stream`.

        It becomes the pack stream, unless gradients are here: those that arrived on the former one have left
        no event.
        """
        if self.count == 0:
            self.pack_stream = stream

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All that gradients have arrived on since the last pack, the pack stream first."""
        return (self.pack_stream, *self._foreign)

    def take(self, unsharded: torch.Tensor, grad: torch.Tensor, streams: Streams) -> bool:
        """Takes a parameter's gradient from autograd, leaving None.

        Returns:
            Whether all gradients are here.

        Streams: called on the stream of the parameter's AccumulateGrad node, which `grad` was written on.

        Raises:
            GradientError: it is sparse.
        """
        unsharded.grad = None
        index = self._index[id(unsharded)]
        if not self._params[index].sharded.requires_grad:
            return False  # frozen since the forward
        if grad.layout is not torch.strided:
            raise GradientError(
                "a gradient of a sharded parameter cannot be used",
                expected="a dense gradient",
                got=f"layout {grad.layout}, shape {tuple(grad.shape)}",
                where=f"parameter {self._params[index].name}",
                fix="sparse=False in the embedding, or leave it out: fully_shard(..., ignored_params=...)",
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
        """Adds a second gradient of a parameter, whose node reentrant checkpointing runs several times."""
        for event in self._foreign.values():
            event.wait(stream)
        packing = streams.event()
        packing.record(self.pack_stream)
        packing.wait(stream)
        self._summed.append(earlier)  # not handed back before the pack, which comes after this sum
        return earlier + grad

    def wait_for_producers(self) -> None:
        """Makes the pack stream wait for every gradient that arrived on another one."""
        for event in self._foreign.values():
            event.wait(self.pack_stream)

    def order_before(self, stream: Stream, streams: Streams) -> None:
        """Makes `stream` wait for every gradient that has arrived since the last call, packed or not.

        See [Note: Branches that send nothing back]. Free where all of backward runs on `stream`.
        """
        for event in self._foreign.values():
            event.wait(stream)
        for packed_on in self._pack_streams:
            if packed_on != stream:
                event = streams.event()
                event.record(packed_on)
                event.wait(stream)
        self._pack_streams.clear()

    def let_go(self, streams: Streams) -> None:
        """Drops the gradients, once their streams are ordered after what the pack stream did with them."""
        self._pack_streams[self.pack_stream] = None
        if self._foreign:
            packed = streams.event()
            packed.record(self.pack_stream)
            for stream in self._foreign:
                packed.wait(stream)
        self.forget()

    def forget(self) -> None:
        """Drops the gradients."""
        self.gradients = [None] * len(self.gradients)
        self._foreign.clear()
        self._summed.clear()
        self.count = 0
