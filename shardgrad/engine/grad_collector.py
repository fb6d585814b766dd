"""Gradients on their way from autograd into a slot.

[Note: Producer streams]
Autograd runs a parameter's hook on the stream its AccumulateGrad node was created on, which is whatever
stream was current when the parameter was first used. A gradient that arrives on another stream than the one
the unit was unsharded on (its *home*) leaves a mark there; the home stream waits for exactly these marks
before it packs, and those streams wait for the pack before their gradient's memory is handed back.

[Note: Branches that send nothing back]
A unit frees its whole parameters when the gradients of its inputs are there. Part of its backward may be
missing in them: a branch whose input was detached sends its gradients to the parameters only. If that branch
runs on another stream, it may still read what is freed. So whoever frees waits for all producers first.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import MethodType

import torch

from shardgrad.engine.param import FSDPParam
from shardgrad.engine.streams import Stream, StreamEvent, Streams
from shardgrad.errors import GradientError

__all__ = ["GradCollector"]

_HOOKED = "_shardgrad_hooked"


class GradCollector:
    """Collects the gradients of one group in one backward.

    Attributes:
        home: the stream the parameters were last made whole for, on which gradients are packed; it stays
            while gradients are here, since those that arrived on it have left no mark.
        gradients: per trainable parameter, what has arrived.
    """

    def __init__(self) -> None:
        self._home: Stream = None
        self.gradients: list[torch.Tensor | None] = []
        self._index: dict[int, int] = {}
        self._foreign: dict[Stream, StreamEvent] = {}
        # Where gradients arrived at home, or were packed: they have no mark, and home may have moved since.
        self._homes: dict[Stream, None] = {}
        self._summed: list[torch.Tensor] = []
        self._count = 0

    def expect(self, params: Sequence[FSDPParam], arrived: MethodType) -> None:
        """Starts over for these parameters, and calls `arrived` for each gradient from now on.

        `arrived` is a bound method; its object is not kept alive, as the garbage collector cannot look into
        hooks. It runs on the stream of the parameter's AccumulateGrad node.
        """
        self._index = {id(p.unsharded): i for i, p in enumerate(params)}
        self.gradients = [None] * len(params)
        self.forget()
        weak, method = weakref.ref(arrived.__self__), arrived.__func__

        def hook(unsharded: torch.Tensor) -> None:
            owner = weak()
            if owner is not None:
                method(owner, unsharded)

        for p in params:
            if p.unsharded is not None and _HOOKED not in p.unsharded.__dict__:
                p.unsharded.__dict__[_HOOKED] = True
                p.unsharded.register_post_accumulate_grad_hook(hook)

    @property
    def home(self) -> Stream:
        """See the class."""
        return self._home

    @home.setter
    def home(self, stream: Stream) -> None:
        if self._count == 0:
            self._home = stream

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All that gradients have arrived on since the last pack, the home stream first."""
        return (self._home, *self._foreign)

    @property
    def count(self) -> int:
        """Parameters whose gradient has arrived."""
        return self._count

    @property
    def complete(self) -> bool:
        """True if every parameter's gradient has arrived."""
        return self._count == len(self.gradients)

    def take(self, unsharded: torch.Tensor, streams: Streams) -> bool:
        """Takes a parameter's gradient from autograd, leaving None; False if there is none.

        Raises:
            GradientError: it is sparse.
        """
        grad = unsharded.grad
        if grad is None:
            return False
        unsharded.grad = None
        if grad.layout is not torch.strided:
            raise GradientError(
                "a gradient of a sharded parameter cannot be used",
                expected="a dense gradient",
                got=f"layout {grad.layout}, shape {tuple(grad.shape)}",
                fix="sparse=False in the embedding, or leave it out: fully_shard(..., ignored_params=...)",
            )
        stream = streams.current()
        index = self._index[id(unsharded)]
        earlier = self.gradients[index]
        if earlier is None:
            self.gradients[index] = grad
            self._count += 1
        else:
            self.gradients[index] = self._add(earlier, grad, stream, streams)
        if stream == self.home:
            self._homes[stream] = None
        else:  # [Note: Producer streams]
            mark = self._foreign.get(stream)
            if mark is None:
                mark = self._foreign[stream] = streams.event()
            mark.record(stream)
        return True

    def _add(
        self, earlier: torch.Tensor, grad: torch.Tensor, stream: Stream, streams: Streams
    ) -> torch.Tensor:
        """Adds a second gradient of a parameter, whose node reentrant checkpointing runs several times."""
        for mark in self._foreign.values():
            mark.wait(stream)
        home = streams.event()
        home.record(self.home)
        home.wait(stream)
        self._summed.append(earlier)  # not handed back before the pack, which comes after this sum
        return earlier + grad

    def wait_for_producers(self) -> None:
        """Makes the home stream wait for every gradient that arrived on another one."""
        for mark in self._foreign.values():
            mark.wait(self.home)

    def order_before(self, stream: Stream, streams: Streams) -> None:
        """Makes `stream` wait for every gradient that has arrived since the last call, packed or not.

        See [Note: Branches that send nothing back]. Free where all of backward runs on `stream`.
        """
        for mark in self._foreign.values():
            mark.wait(stream)
        for home in self._homes:
            if home != stream:
                mark = streams.event()
                mark.record(home)
                mark.wait(stream)
        self._homes.clear()

    def let_go(self, streams: Streams) -> None:
        """Drops the gradients, once their streams are ordered after what the home stream did with them."""
        self._homes[self.home] = None
        if self._foreign:
            packed = streams.event()
            packed.record(self.home)
            for stream in self._foreign:
                packed.wait(stream)
        self.forget()

    def forget(self) -> None:
        """Drops the gradients."""
        self.gradients = [None] * len(self.gradients)
        self._foreign.clear()
        self._summed.clear()
        self._count = 0
