"""The objects that programs see as gradients, and what happens to those that a program keeps.

[Note: Kept gradients]
In plain torch, `g = p.grad; p.grad = None` and another backward leave `g` as it was: the backward
makes a new tensor. Here it may write to the same memory. So before memory whose gradient is None is
written or freed, the engine looks whether the program still holds anything over it: the gradient
itself, or something else with its storage. If so, the program keeps this memory, and the group goes
on with other memory and new objects in those places. A graph that knows the memory is of no use
then, and is captured again.

Every gradient has a storage that no other one has, so reference counts tell, in a few passes in C
over however many there are, and a program that keeps none pays nothing else. Alternatives:
docs/design/gradients.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not, ne
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.policies import GradientPolicy
from shardgrad.sharding.dtensor import dtensor_like, in_own_storage, storages_of
from shardgrad.sharding.layout import ShardLayout

__all__ = [
    "ABSENT",
    "PLAIN",
    "Bound",
    "GradientObjects",
    "keep_for_current_stream",
]

# What is bound to a parameter.
ABSENT, PLAIN = 0, 1
# One of these, or a tensor that the program has assigned.
Bound = int | torch.Tensor

_uses_of: Callable[[int], int] = torch._C._storage_Use_Count


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Tells the allocator that the current stream reads a tensor of another one, which is dropped
    next.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def _references_when_bound() -> int:
    """Returns how many references to a tensor's object a `.grad` is, which depends on torch's
    version.
    """
    param, grad = torch.zeros(1), torch.zeros(1)
    before = sys.getrefcount(grad)
    param.grad = grad
    return sys.getrefcount(grad) - before


class GradientObjects:
    """A gradient for each parameter of a shard, and what is bound to the parameters.

    They exist without memory; `place` gives it to them.

    Args:
        params: the sharded parameters.
        layout: of the memory.
        rank: whose pieces they are.
        nothing: without elements; in the dtype and on the device of the memory.
        policy: names the attribute of parameters that gradients are bound to.

    Attributes:
        plain: the gradients.
        views: of the memory, for each parameter, in its local shape; none without memory.
        own: what an object is, by its `id`: ABSENT or PLAIN. Another dict once they change.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: ShardLayout,
        rank: int,
        nothing: torch.Tensor,
        policy: GradientPolicy,
    ) -> None:
        self._params = list(params)
        self._layout = layout
        self._rank = rank
        self._nothing = nothing
        self._placed: tuple[int, int] | None = None  # storage and address
        self.views: list[torch.Tensor] = []
        self.attribute = policy.attribute
        self._read = attrgetter(policy.attribute)
        self._references_when_bound = 1 if policy.decoupled else _references_when_bound()
        # Tensors of the meta device, and fake ones, have the storage of the flat memory.
        self._is_watched = bool(self._params) and nothing.untyped_storage().device.type != "meta"
        self._locals = [nothing] * len(params)
        self.plain = [cast(DTensor, param) for param in self._params]
        self.leave(range(len(params)))
        # While nothing else refers to them; later objects have the same.
        self._unkept = self._counts()
        self._overwritten: list[int] = []
        for param in self._params:
            if policy.decoupled:
                setattr(param, self.attribute, getattr(param, self.attribute, None))
            elif param.dtype != nothing.dtype:
                param.grad_dtype = nothing.dtype

    def leave(self, places: Sequence[int]) -> None:
        """Leaves the gradients of these places to the program, and makes new ones, without
        memory.
        """
        for place in places:
            local = self._locals[place] = self._nothing.new_empty(0)
            self.plain[place] = dtensor_like(local, cast(DTensor, self._params[place]))
        self._watch()

    # -- memory

    def place(self, flat: torch.Tensor) -> None:
        """Points the gradients to 1-D memory, in a storage of its own each, as `in_own_storage`
        says why.

        Memory that was gone and is back at its address costs nothing.
        """
        memory = flat.untyped_storage()
        placed = memory._cdata, memory.data_ptr() if self._is_watched else 0
        if self._placed != placed:
            self.views = self._layout.local_views(flat, self._rank)
            self._point(self.views)
            self._placed = placed

    def take_away(self) -> None:
        """Lets go of the memory, which another may keep, until they are placed again."""
        self._placed, self.views = None, []
        self._point([self._nothing] * len(self.plain))

    def _point(self, views: Sequence[torch.Tensor]) -> None:
        for place, view in enumerate(views):
            if self._is_watched:
                self._locals[place].set_(in_own_storage(view))  # type: ignore[call-overload]
            else:
                self._locals[place] = self.plain[place]._local_tensor = view.data
        self._watch()

    def _watch(self) -> None:
        self.own = {id(None): ABSENT}
        self.own.update((id(grad), PLAIN) for grad in self.plain)
        self._watched: list[torch.Tensor] = [*self.plain, *self._locals]
        self._storages = [local.untyped_storage()._cdata for local in self._locals]
        self._own_data = storages_of(self.plain)

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

    def have_own_data(self) -> bool:
        """Returns False after `grad.data = dtensor`, which leaves the values as they were."""
        return all(map(is_, storages_of(self.plain), self._own_data))

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
        """Returns how often gradients, then local tensors and storages are referred to."""
        return [*map(sys.getrefcount, self._watched), *map(_uses_of, self._storages)]

    def held(self) -> list[int]:
        """Returns the places of which the program holds more than the gradient that is bound."""
        # In a steady step the counts are those of the beginning, and nothing else is looked at.
        counts, size = self._counts(), len(self.plain)
        if counts == self._unkept or not self._is_watched:
            return []
        for place, what in enumerate(self.bound()):
            if what is PLAIN:
                counts[place] -= self._references_when_bound
        differ = list(map(ne, counts, self._unkept))
        return [place for place in range(size) if any(differ[place::size])]

    def kept(self) -> list[int]:
        """Returns the places whose gradients are None, but held by the program."""
        # A gradient that is bound may be held as well: it is added to, and meant to change.
        gradients = self.gradients()
        if not any(map(is_, gradients, repeat(None))):
            return []
        return [place for place in self.held() if gradients[place] is None]

    def begin_capture(self) -> list[int]:
        """Returns a list to which the capture that begins adds what each replay overwrites."""
        self._overwritten = []
        return self._overwritten

    def note_overwritten(self) -> None:
        """In a capture, takes note of the gradients that each of its replays will overwrite."""
        self._overwritten += [place for place, what in enumerate(self.bound()) if what is ABSENT]
