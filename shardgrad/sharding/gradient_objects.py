"""The objects that programs see as gradients, and what happens to those that a program keeps.

[Note: Kept gradients]
In plain torch, `g = p.grad; p.grad = None` and another backward leave `g` as it was: the backward
makes a new tensor. Here it may write to the same memory. So before memory whose gradient is None is
written or freed, the engine looks whether the program still holds anything over it: the gradient
itself, or another tensor with its storage. That is moved to a copy, and a new gradient object takes
the place over the old address. Every gradient has a storage that no other one has, so reference
counts tell, in a few passes in C over however many there are, and a program that keeps none pays
nothing else. Alternatives: docs/design/kept_gradients.md.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
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
    "KeptGradientWarning",
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


class KeptGradientWarning(UserWarning):
    """Something that is no tensor keeps the memory of a gradient that is about to be
    overwritten.
    """


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
        self._storages: list[int] = []
        for place in range(len(self._params)):
            self._make(place)
        self._watch()
        self._unkept = (
            self._counts()
        )  # while nothing else refers to them; later objects have the same
        self.overwritten: list[int] = []
        for param in self._params:
            if policy.decoupled:
                setattr(param, self.attribute, getattr(param, self.attribute, None))
            elif param.dtype != nothing.dtype:
                param.grad_dtype = nothing.dtype

    def _make(self, place: int) -> None:
        """Makes the objects of a place, the next one or one that exists."""
        local = self._nothing.new_empty(0)
        if self._memory is not None:
            self._point(local, place, self._memory)
        plain = dtensor_like(local, cast(DTensor, self._params[place]))
        self.plain[place : place + 1] = [plain]
        self._locals[place : place + 1] = [local]
        self._storages[place : place + 1] = [local.untyped_storage()._cdata]

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

    def may_be_kept(self) -> bool:
        """Returns whether the program may hold a gradient; no gradient is bound."""
        return self._is_watched and self._counts() != self._unkept

    def _kept(self, counts: Sequence[int], expected: Sequence[int]) -> list[int]:
        """Returns the places of which the program holds more than is expected."""
        differ, size = list(map(ne, counts, expected)), len(self.plain)
        return [place for place in range(size) if any(differ[place::size])]

    def part_with_kept(self, reader: Stream, *, capturing: bool = False) -> None:
        """Parts with gradients that a reduction is about to overwrite, since they are None.

        In a capture, where nothing can be copied, it takes note of them in `overwritten`.

        Args:
            reader: see `part_with`.
            capturing: whether work of the current stream is captured.
        """
        if not any(map(is_, map(self._read, self._params), repeat(None))):
            return
        if capturing:
            self.overwritten += [place for place, what in enumerate(self.bound()) if what is ABSENT]
            return
        counts = self._counts()
        if counts != self._unkept and self._is_watched:
            bound = self.bound()
            kept = self._kept(counts, self.counts_if_none_is_kept(bound))
            self.part_with([place for place in kept if bound[place] is ABSENT], reader)

    def part_with_held(self, places: Sequence[int], reader: Stream) -> None:
        """Parts with the gradients of these places that the program still holds, wherever.

        See `part_with`. None of these gradients is bound to its own parameter.
        """
        counts = self._counts()
        if counts != self._unkept and self._is_watched:
            kept = self._kept(counts, self.counts_if_none_is_kept(self.bound()))
            self.part_with(sorted({*kept} & {*places}), reader)

    def before_replays(self) -> Callable[[Stream], None]:
        """Returns what parts, before each replay, with gradients that the capture about to begin
        overwrites.

        What is bound is the same before each of them. It takes the reader that `part_with` takes.
        """
        overwritten: list[int] = []
        self.overwritten = overwritten
        bound = self.bound()
        expected = self.counts_if_none_is_kept(bound)

        def part_with_overwritten(reader: Stream) -> None:
            if overwritten and self._is_watched:
                counts = self._counts()
                if counts != expected:
                    self.part_with(sorted({*self._kept(counts, expected)} & {*overwritten}), reader)

        return part_with_overwritten

    def part_with(self, places: Sequence[int], reader: Stream) -> None:
        """Moves gradients that the program keeps to copies, along with all tensors that share their
        memory.

        New ones over the old addresses take their place, also where they are bound.

        Args:
            places: of the gradients.
            reader: the stream on which the program reads; None on the CPU.

        Streams: the copies are made on the current stream, where the gradients have to be final.
        Capture: not safe.
        """
        if not places:
            return
        bound, storages, unkept = self.bound(), self._storages, self._unkept[2 * len(self.plain) :]
        aliases = _tensors_by_storage(
            {storages[p] for p in places if _uses_of(storages[p]) > unkept[p]}
        )
        unseen = []
        for place in places:
            local, storage = self._locals[place], self._locals[place].untyped_storage()
            copy = local.clone()
            if reader is not None:
                copy.record_stream(reader)
            for tensor in (
                local,
                *(alias for alias in aliases[storage._cdata] if alias is not local),
            ):
                where = tensor.storage_offset(), tensor.shape, tensor.stride()
                tensor.data = tensor.new_empty(0).set_(copy.untyped_storage(), *where)
            if _uses_of(storage._cdata) > 1:  # besides `storage`
                torch.autograd.graph.increment_version(local)
                unseen.append(self._names[place])
            self._make(place)
            self.bind(place, bound[place])
        self._watch()
        if unseen:
            warnings.warn(
                "shardgrad: a gradient is about to be overwritten, and an autograd graph, or "
                "something else "
                f"that is no tensor, keeps its memory: {', '.join(unseen)}. It will show the next "
                f"gradient, "
                "and backward through it will raise. Use p.grad.clone() there",
                KeptGradientWarning,
                stacklevel=2,
            )


def _tensors_by_storage(storages: Collection[int]) -> dict[int, list[torch.Tensor]]:
    """Returns the tensors with these storages, as far as the garbage collector knows; a search of
    0.1 s.
    """
    found: dict[int, list[torch.Tensor]] = {storage: [] for storage in storages}
    if not storages:
        return defaultdict(list)
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            if not issubclass(
                type(each), torch.Tensor
            ):  # isinstance would ask objects for their `__class__`
                continue
            try:
                storage = each.untyped_storage()._cdata
            except (NotImplementedError, RuntimeError):  # a layout that has none
                continue
            if storage in found:
                found[storage].append(each)
    return defaultdict(list, found)
