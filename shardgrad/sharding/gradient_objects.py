"""The objects that programs see as gradients, and what happens to those that a program keeps.

[Note: Kept gradients]
In plain torch, `g = p.grad; p.grad = None` and another backward leave `g` as it was: the backward
makes a new tensor. Here it may write to the same memory. So before memory whose gradient is None is
written or freed, the engine looks whether the program still holds anything over it: the gradient
itself, or something else with its storage. If so, the program keeps this memory, and the group goes
on with other memory and new objects. Memory that a graph knows cannot be exchanged under it: there,
the gradient that the program holds moves to a copy, and a new object takes its place. Views cannot
be moved; where there are some, the group takes other memory after all, and graphs are captured
again.

Every gradient has a storage that no other one has, so reference counts tell, in a few passes in C
over however many there are, and a program that keeps none pays nothing else. Alternatives:
docs/design/gradients.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from math import prod
from operator import attrgetter, is_, is_not, ne
from typing import Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.policies import GradientPolicy
from shardgrad.sharding.dtensor import dtensor_like
from shardgrad.sharding.layout import ShardLayout

__all__ = [
    "ABSENT",
    "PLAIN",
    "Bound",
    "GradientObjects",
    "counts_if_none_is_kept",
    "counts_of",
    "keep_for_current_stream",
]

# What is bound to a parameter.
ABSENT, PLAIN = 0, 1
# One of these, or a tensor that the program has assigned.
Bound = int | torch.Tensor

Stream = torch.Stream | None
_uses_of: Callable[[int], int] = torch._C._storage_Use_Count
_WATCHED, _STORAGES = attrgetter("_watched"), attrgetter("_storages")


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Tells the allocator that the current stream reads a tensor of another one, which is dropped
    next.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def counts_of(objects: Sequence[GradientObjects]) -> list[list[int]]:
    """Returns how often what several shards watch is referred to: tensors of all, then storages of
    all.
    """
    watched = chain.from_iterable(map(_WATCHED, objects))
    storages = chain.from_iterable(map(_STORAGES, objects))
    return [list(map(sys.getrefcount, watched)), list(map(_uses_of, storages))]


def counts_if_none_is_kept(
    objects: Sequence[GradientObjects], bound: Sequence[Sequence[Bound]]
) -> list[list[int]]:
    """Returns what `counts_of` returns while the program holds nothing but what is `bound`."""
    expected = [
        each.counts_if_none_is_kept(what) for each, what in zip(objects, bound, strict=True)
    ]
    ends = [2 * len(each.plain) for each in objects]
    tensors = (counts[:end] for counts, end in zip(expected, ends, strict=True))
    storages = (counts[end:] for counts, end in zip(expected, ends, strict=True))
    return [list(chain.from_iterable(tensors)), list(chain.from_iterable(storages))]


def _references_when_bound() -> int:
    """Returns how many references to a tensor's object a `.grad` is, which depends on torch's
    version.
    """
    param, grad = torch.zeros(1), torch.zeros(1)
    before = sys.getrefcount(grad)
    param.grad = grad
    return sys.getrefcount(grad) - before


class _Named(Protocol):
    name: str
    sharded: nn.Parameter


class GradientObjects:
    """A gradient for each parameter of a shard, and what is bound to the parameters.

    They exist without memory; `place` gives it to them.

    Args:
        params: what has a name and a sharded parameter.
        layout: of the memory.
        rank: whose pieces they are.
        nothing: without elements; in the dtype and on the device of the memory.
        policy: names the attribute of parameters that gradients are bound to.

    Attributes:
        plain: the gradients.
        own: what an object is, by its `id`: ABSENT or PLAIN. Another dict once they change.
        overwritten: places whose gradients are None where the capture that runs, or ran last,
            reduces them.
    """

    def __init__(
        self,
        params: Sequence[_Named],
        layout: ShardLayout,
        rank: int,
        nothing: torch.Tensor,
        policy: GradientPolicy,
    ) -> None:
        self._params = [p.sharded for p in params]
        self._names = [p.name for p in params]
        self._layout = layout
        self._rank = rank
        self._nothing = nothing
        self._memory: torch.UntypedStorage | None = None
        self._placed: tuple[int, int] | None = None  # storage and address
        self.attribute = policy.attribute
        self._read = attrgetter(policy.attribute)
        self._references_when_bound = 1 if policy.decoupled else _references_when_bound()
        # Tensors of the meta device, and fake ones, have the storage of the flat memory.
        self._is_watched = bool(self._params) and nothing.untyped_storage().device.type != "meta"
        shapes = [piece.local_shape(rank) for piece in layout.pieces]
        strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
        begins = [piece.shard_offset * nothing.itemsize for piece in layout.pieces]
        ends = [
            at + prod(shape) * nothing.itemsize for at, shape in zip(begins, shapes, strict=True)
        ]
        self._places = list(zip(begins, ends, shapes, strides, strict=True))
        self.plain: list[DTensor] = []
        self._locals: list[torch.Tensor] = []
        for place in range(len(self._params)):
            plain, local = self._make(place)
            self.plain.append(plain)
            self._locals.append(local)
            del plain, local  # references are counted next
        self._storages = [local.untyped_storage()._cdata for local in self._locals]
        self._watch()
        # While nothing else refers to them; later objects have the same.
        self._unkept = self._counts()
        self.overwritten: list[int] = []
        for param in self._params:
            if policy.decoupled:
                setattr(param, self.attribute, getattr(param, self.attribute, None))
            elif param.dtype != nothing.dtype:
                param.grad_dtype = nothing.dtype

    def _make(self, place: int) -> tuple[DTensor, torch.Tensor]:
        """Returns a new gradient for a place, and its local tensor."""
        local = self._nothing.new_empty(0)
        if self._memory is not None:
            self._point(local, place, self._memory)
        return dtensor_like(local, cast(DTensor, self._params[place])), local

    def leave(self, places: Sequence[int]) -> None:
        """Leaves the gradients of these places to the program, and makes new ones."""
        for place in places:
            self.plain[place], self._locals[place] = self._make(place)
            self._storages[place] = self._locals[place].untyped_storage()._cdata
        self._watch()

    # -- memory

    def place(self, flat: torch.Tensor) -> None:
        """Points the gradients to 1-D memory, in a storage of its own each, as `in_own_storage`
        says why.

        Memory that was gone and is back at its address costs nothing.
        """
        memory = self._memory = flat.untyped_storage()
        before, self._placed = (
            self._placed,
            (memory._cdata, memory.data_ptr() if self._is_watched else 0),
        )
        if self._placed == before:
            return
        if self._is_watched:
            for place, local in enumerate(self._locals):
                self._point(local, place, memory)
        else:
            for place, view in enumerate(self._layout.local_views(flat, self._rank)):
                self._locals[place] = self.plain[place]._local_tensor = view.data
            self._watch()
        self._storages = [local.untyped_storage()._cdata for local in self._locals]

    def take_away(self) -> None:
        """Lets go of the memory, which another may keep, until they are placed again."""
        self._memory = self._placed = None
        for place, local in enumerate(self._locals):
            if self._is_watched:
                local.set_()  # type: ignore[call-overload]  # to nothing
            else:
                self._locals[place] = self.plain[place]._local_tensor = self._nothing
        self._storages = [local.untyped_storage()._cdata for local in self._locals]

    def _point(self, local: torch.Tensor, place: int, memory: torch.UntypedStorage) -> None:
        begin, end, shape, stride = self._places[place]
        local.set_(memory[begin:end], 0, shape, stride)

    def _watch(self) -> None:
        self.own = {id(None): ABSENT}
        self.own.update((id(grad), PLAIN) for grad in self.plain)
        self._watched: list[torch.Tensor] = [*self.plain, *self._locals]

    # -- what is bound

    def gradients(self) -> list[torch.Tensor | None]:
        """Returns what is bound to the parameters, in order."""
        return list(map(self._read, self._params))

    def are_absent(self) -> bool:
        """Returns whether no parameter has a gradient."""
        return not any(map(is_not, map(self._read, self._params), repeat(None)))

    def are_bound(self) -> bool:
        """Returns whether every parameter has its gradient of these."""
        return all(map(is_, map(self._read, self._params), self.plain))

    def is_any_bound(self) -> bool:
        """Returns whether a gradient of these is bound to its parameter."""
        return any(what is PLAIN for what in self.bound())

    def bound(self) -> tuple[Bound, ...]:
        """Returns what the gradients of the parameters are."""
        gradients = self.gradients()
        return tuple(map(self.own.get, map(id, gradients), gradients))  # type: ignore[arg-type]

    def bind(self, place: int, what: Bound = PLAIN) -> None:
        """Binds one of the objects of a place to its parameter, or a tensor of the program."""
        objects = None, self.plain[place]
        grad = what if isinstance(what, torch.Tensor) else objects[what]
        if getattr(self._params[place], self.attribute, None) is not grad:
            setattr(self._params[place], self.attribute, grad)

    def restore(self, bound: Sequence[Bound]) -> None:
        """Binds what was bound when `bound` returned this."""
        if not all(map(is_, self.bound(), bound)):
            for place, what in enumerate(bound):
                self.bind(place, what)

    # -- what the program keeps

    def _counts(self) -> list[int]:
        """Returns how often gradients, then local tensors and storages are
        referred to.
        """
        return [*map(sys.getrefcount, self._watched), *map(_uses_of, self._storages)]

    def counts_if_none_is_kept(self, bound: Sequence[Bound]) -> list[int]:
        """Returns the counts that there are while the program holds nothing but what is bound."""
        expected = list(self._unkept)
        for place, what in enumerate(bound):
            if what is PLAIN:
                expected[place] += self._references_when_bound
        return expected

    def _kept(self, counts: Sequence[int], expected: Sequence[int]) -> list[int]:
        """Returns the places of which the program holds more than is expected."""
        differ, size = list(map(ne, counts, expected)), len(self.plain)
        return [place for place in range(size) if any(differ[place::size])]

    def kept(self) -> list[int]:
        """Returns the places whose gradients are None, but held by the program."""
        if not any(map(is_, map(self._read, self._params), repeat(None))):
            return []
        counts = self._counts()
        if counts == self._unkept or not self._is_watched:
            return []
        bound = self.bound()
        kept = self._kept(counts, self.counts_if_none_is_kept(bound))
        return [place for place in kept if bound[place] is ABSENT]

    def held(self, places: Sequence[int]) -> list[int]:
        """Returns those of the places whose gradients, bound elsewhere if at all, are held."""
        counts = self._counts()
        if counts == self._unkept or not self._is_watched:
            return []
        return sorted({*self._kept(counts, self.counts_if_none_is_kept(self.bound()))} & {*places})

    def note_overwritten(self) -> None:
        """In a capture, takes note of the gradients that each of its replays will overwrite."""
        self.overwritten += [place for place, what in enumerate(self.bound()) if what is ABSENT]

    def before_replays(self) -> Callable[[Stream], bool]:
        """Returns what moves, before each replay, gradients that the capture about to begin
        overwrites.

        What is bound is the same before each of them. It takes the reader that `move_out` takes,
        and returns False if there must be no replay: the program keeps views of some.
        """
        overwritten: list[int] = []
        self.overwritten = overwritten
        bound = self.bound()
        expected = self.counts_if_none_is_kept(bound)

        def move_overwritten(reader: Stream) -> bool:
            if not (overwritten and self._is_watched):
                return True
            counts = self._counts()
            if counts == expected:
                return True
            places = sorted({*self._kept(counts, expected)} & {*overwritten})
            if self.are_viewed(places):
                return False
            self.move_out(places, reader)
            return True

        return move_overwritten

    def are_viewed(self, places: Sequence[int]) -> bool:
        """Returns whether anything but gradients and their local tensors shares their memory."""
        unkept = self._unkept[2 * len(self.plain) :]
        return any(_uses_of(self._storages[place]) > unkept[place] for place in places)

    def move_out(self, places: Sequence[int], reader: Stream) -> None:
        """Moves gradients that the program keeps to copies: a graph knows their memory.

        New ones over the old addresses take their place, also where they are bound.

        Args:
            places: of the gradients.
            reader: the stream on which the program reads; None on the CPU.

        Streams: the copies are made on the current stream, where the gradients have to be final.
        Capture: not safe.
        """
        bound, kept = self.bound(), [self._locals[place] for place in places]
        self.leave(places)
        for place, local in zip(places, kept, strict=True):
            copy = local.clone()
            if reader is not None:
                copy.record_stream(reader)
            local.set_(copy.untyped_storage(), 0, copy.shape, copy.stride())
            self.bind(place, bound[place])
