"""The gradient shard: one flat buffer per group whose views are the parameters' gradients.

[Note: Gradient binding]
Each parameter's gradient is one DTensor over its place in the shard, and stays the same object
until the program keeps it. A reduction overwrites the memory if the gradient is None, else it adds.
If the gradient is another tensor (assigned by hand, or accumulated by autograd through a DTensor
operation), it is copied into the shard and the shard's own gradient is bound again. A parameter
without a gradient on any rank keeps None.

[Note: Kept gradients]
In plain torch, `g = p.grad; p.grad = None` and another backward leave `g` unchanged, because the
backward creates a new tensor. Here the backward may write to the same memory. So before writing or
freeing memory whose gradient is None, the engine checks whether the program still holds anything
over it: the gradient itself, or another tensor with its storage. If so, the program keeps this
memory, and the group gets other memory and new objects for those places. A graph that knows the
memory cannot be replayed any more and is captured again.

Every gradient has a storage of its own, so reference counts answer this in a few passes in C. A
program that keeps no gradients pays for this check only. Alternatives: docs/design/gradients.md.

[Note: Live flags]
Kernels that read the shard (norms, optimizers) do not look at `param.grad`, but at one element per
parameter after the gradients. If it is above zero, the parameter is *live*. A reduction writes
these flags ([Note: Touched flags] in `grad_group.py`). If the program sets a gradient to None or
assigns one, `settle` updates the flag before a kernel reads it.

[Note: Verdicts]
A norm that has checked whether gradients are finite stores the result here with each of them, for
optimizers and loss scalers. It is valid for one version of the gradient. A reduction invalidates
it, and so does a write by the program, which changes the version (torch's
`zero_grad(set_to_none=False)`, `grad.mul_()`). The engine's own writes to one gradient change it as
well; those to the flat memory, as when clipping multiplies it, do not.

[Note: Memory of gradients]
While all gradients of a shard are None, its memory would only raise the peak, which is often at the
loss. So on a device the outermost forward frees it and the next reduction allocates it again, both
on the pack stream. These keep their address: memory that a graph reads or writes, memory on the
CPU, where new pages cost more, and memory of a `GradientPolicy(persistent=True)`. A graph in which
gradients are None at both ends has its own memory: see `graphs/engine_state.py`.

[Note: Missed parameters]
The flags say whether another rank had a gradient for a parameter that has none on this rank. They
are copied to the host after the reduction, and read once all of a backward is launched, so that the
host does not wait earlier. A capture cannot wait for them. It uses what the host saw in an eager
step with the same gradients on this rank. Without such a step, every parameter counts as having a
gradient, and the flags on the device decide at each replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import cache
from itertools import repeat
from operator import add, attrgetter, is_, is_not, ne
from typing import cast

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch.distributed.tensor import DTensor

from shardgrad.engine.param_group import FSDPParam, ParamGroup
from shardgrad.engine.streams import Stream, StreamEvent, Streams, keep_for_current_stream
from shardgrad.errors import ForeignParameterError
from shardgrad.sharding.dtensor import dtensor_like, in_own_storage, local_of, storages_of
from shardgrad.sharding.layout import ShardLayout
from shardgrad.sharding.param_sharding import groups_cut_over

# The `.grad` of a parameter: OWN (its gradient in the shard), None, or an assigned tensor.
OWN = True
Bound = bool | torch.Tensor | None

# Per parameter, its `.grad`; the verdicts by place; per parameter, its flag.
HostState = tuple[tuple[Bound, ...], dict[int, torch.Tensor], tuple[bool, ...]]


_VERSION = attrgetter("_version")
_uses_of: Callable[[int], int] = torch._C._storage_Use_Count


@cache
def _references_when_bound() -> int:
    """Returns how many references a `.grad` holds to its tensor; depends on torch's version."""
    param, grad = torch.zeros(1), torch.zeros(1)
    before = sys.getrefcount(grad)
    param.grad = grad
    return sys.getrefcount(grad) - before


def _is_slice(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's storage is a slice of other memory, as a gradient's is."""
    return not tensor.untyped_storage().resizable()


class GradMemory(Enum):
    """Whether a shard has memory. See [Note: Memory of gradients]."""

    NONE = auto()  # all gradients are None
    FREEABLE = auto()  # may be freed while all gradients are None
    # Stays at its address. Only a graph frees memory of its own pool.
    FIXED = auto()


class GradShard:
    """Gradients of one group on one rank.

    The group's `shard_memory` says where the memory is: [Note: Shards on the host] in
    `sharding/offload.py`.

    Attributes:
        layout: of the parameters, with a tail.
        flat: the memory, 1-D; empty before the first allocation.
        values: the part of `flat` with the gradients and the zeros between them.
        flags: [Note: Live flags].
        own: the gradients, which exist even without memory.
        views: of `flat`, for each parameter, in its local shape.
        is_captured: a graph is being captured; see `look`.
        on_overwrite: a capture calls it with the places that are None before it overwrites them, as
            replays will.
        awaiting_hooks: parameters whose hooks are still to run; see `run_hooks`.
    """

    def __init__(
        self,
        group: ParamGroup,
        params: Sequence[FSDPParam],
        layout: ShardLayout,
    ) -> None:
        dtype, policy, home = group.gradient_dtype, group.gradient_policy, group.shard_memory
        self.params = [p.sharded for p in params]  # the trainable ones, in layout order
        self.count = len(params)
        self._managed = list(params)  # the same
        self.layout = layout
        self.attribute = policy.attribute  # of a parameter, where its gradient is bound
        self._is_persistent = policy.persistent
        self.mesh = group.mesh
        self._home = home
        self._brought: StreamEvent | None = None
        self.memory = GradMemory.NONE
        self.stream: Stream = None  # on which memory is allocated; None on the CPU
        self.is_captured = False
        self._nothing = home.zeros(0, dtype)
        self._index = {id(param): i for i, param in enumerate(self.params)}
        # The flags, as far as the host knows them.
        self.flagged = [False] * len(self.params)
        self._seen: dict[tuple[bool, ...], tuple[bool, ...]] = {}
        # By place, a float32 device scalar, above zero if the norm that checked the gradient found
        # an infinity or a NaN; and each gradient's version when it was checked.
        self.judged: dict[int, torch.Tensor] = {}
        self._judged_at = [0] * self.count
        # What was touched on this rank, the flags that `decide` waits for, and the event of their
        # arrival.
        self._told: tuple[tuple[bool, ...], torch.Tensor, StreamEvent] | None = None
        self.awaiting_hooks: list[torch.Tensor] = []
        self.read: list[torch.Tensor] = []  # kept until the program's stream waits for a reduction
        for param in self.params:
            if param.dtype != dtype and not policy.decoupled:
                param.grad_dtype = dtype
        self._gradient_of = attrgetter(self.attribute)
        self._references_when_bound = 1 if policy.decoupled else _references_when_bound()
        # Meta and fake tensors share the storage of the flat memory.
        self._is_watched = bool(params) and self._nothing.untyped_storage().device.type != "meta"
        self.on_overwrite: Callable[..., None] = lambda _: None
        self._placed: tuple[int, int] | None = None  # storage and address
        self._locals = [self._nothing] * self.count
        self.own = [cast(DTensor, param) for param in self.params]
        self._renew(range(self.count))
        self.place_in(self._nothing)
        # Reference counts while nothing else refers to the objects; equal for objects made later.
        self._unkept = self._counts()

    def _renew(self, places: Iterable[int]) -> None:
        """Creates new gradients for these places, without memory."""
        for place in places:
            local = self._locals[place] = self._nothing.new_empty(0)
            self.own[place] = dtensor_like(local, cast(DTensor, self.params[place]))

    # -- memory: see the note

    def place_in(self, flat: torch.Tensor) -> None:
        """Points the gradients to the 1-D memory `flat`, each with a storage of its own.

        `in_own_storage` says why. An empty `flat` leaves them without memory. If storage is
        allocated again at its old address, nothing has to be done.
        """
        memory = flat.untyped_storage()
        placed = memory._cdata, memory.data_ptr() if self._is_watched else 0
        if self._placed == placed:
            return
        layout, self.flat, self._placed = self.layout, flat, placed
        numel, count = (layout.tail_offset, len(layout.pieces)) if flat.numel() else (0, 0)
        self.values, self.flags = flat.narrow(0, 0, numel), flat.narrow(0, numel, count)
        self.views = layout.local_views(flat, self.mesh.shard_rank) if count else []
        for place, view in enumerate(self.views or [self._nothing] * self.count):
            self._locals[place].set_(in_own_storage(view))  # type: ignore[call-overload]
        self._watched: list[torch.Tensor] = [*self.own, *self._locals]
        self._storages = [local.untyped_storage()._cdata for local in self._locals]
        self._own_data = storages_of(self.own)

    def allocate(self, *, zeroed: bool = True) -> None:
        """Allocates memory if there is none. Unless `zeroed`, the caller has to write all of it.

        Streams: allocates and zeroes on the current one. Capture: safe after `look`.
        """
        if self.has_memory:
            return
        self.stream = self.current_stream()
        stays = self._is_persistent or self._home.is_offloaded or self._home.is_virtual
        may_go = self.stream is not None and not (stays or self.is_captured)
        flat = self.flat
        with torch.inference_mode(mode=False):  # a step in inference mode may be the first
            if flat.numel():
                flat.untyped_storage().resize_(flat.nbytes)
                if zeroed:
                    flat.zero_()
            else:  # at first, or the program keeps the former memory
                flat = self._home.zeros(self.layout.chunk_numel, flat.dtype)
            self.place_in(flat)
        self.memory = GradMemory.FREEABLE if may_go else GradMemory.FIXED

    def look(self, *, is_captured: bool) -> None:
        """Notes whether a graph is being captured: it then knows the address of existing memory.

        Called when a forward opens, a reduction starts, or an optimizer reads the gradients.
        """
        self.is_captured = is_captured
        if is_captured and self.memory is GradMemory.FREEABLE:
            self.memory = GradMemory.FIXED

    @property
    def has_memory(self) -> bool:
        """False if all gradients are None and their memory was freed, or there was none yet."""
        return self.memory is not GradMemory.NONE

    def free(self, reader: Stream) -> None:
        """Frees the memory, which exists; all gradients are None. If the program keeps any, it
        keeps all of it.

        The program reads kept gradients on `reader`.

        Streams: `self.stream` must be ordered after all uses.
        """
        self.flagged = [False] * self.count
        kept = self.kept_places()
        if kept:
            self._record(reader)
            self._renew(kept)
            self.place_in(self._nothing)
        else:
            self.flat.untyped_storage().resize_(0)
        self.memory = GradMemory.NONE

    @torch.inference_mode(mode=False)
    def leave(self) -> None:
        """Leaves bound gradients to a shard that replaces this one, and adds to them.

        Persistent ones get memory of their own: `_take_over` refuses that of other gradients.
        """
        for place, grad in enumerate(self.bound() if self._is_persistent else ()):
            if grad is self.own[place]:
                self._locals[place].set_(self.views[place].clone())  # type: ignore[call-overload]

    def current_stream(self) -> Stream:
        """Returns the current stream of the memory's device; None on the CPU."""
        device = self._nothing.device
        is_host = device.type in ("cpu", "meta")
        return None if is_host else torch.accelerator.current_stream(device)

    def _record(self, reader: Stream) -> None:
        """Tells the allocator that the program, which keeps the memory, reads it on `reader`."""
        if reader is not None and self.flat.device.type != "cpu":
            self.flat.record_stream(reader)

    # -- before and after a reduction

    def _part_with_kept(self, reader: Stream) -> None:
        """Leaves memory to kept gradients before it is written: [Note: Kept gradients].

        The program reads them on `reader`. A capture tells which places its replays overwrite.
        """
        if self._is_persistent or self.memory is GradMemory.NONE:
            return
        if self.is_captured:
            self.on_overwrite([i for i, grad in enumerate(self.bound()) if grad is None])
        elif held := self.kept_places():
            # A bound gradient may be held as well. It is added to, and expected to change.
            bound = self.bound()
            if kept := [place for place in held if bound[place] is None]:
                self._part_with(kept, reader)

    def _part_with(self, places: Sequence[int], reader: Stream) -> None:
        """Moves these places to memory that the program holds nothing of, or, in a capture, what
        the program holds of them to other memory.
        """
        if self.are_absent():
            self.free(reader)
        elif self.is_captured:  # the graph knows the address
            for place in places:
                self._locals[place].set_(self.views[place].clone())  # type: ignore[call-overload]
            self._renew(places)
            self._placed = None
            self.place_in(self.flat)
        else:
            self._record(reader)
            self.stream = self.current_stream()
            with torch.inference_mode(mode=False):
                self._renew(places)
                self.place_in(self._home.zeros(self.flat.numel(), self.flat.dtype).copy_(self.flat))

    def _counts(self) -> list[int]:
        """Returns the reference counts of gradients, local tensors, then storages."""
        return [*map(sys.getrefcount, self._watched), *map(_uses_of, self._storages)]

    def kept_places(self) -> list[int]:
        """Returns the places for which the program holds more than the bound gradient."""
        # In a steady step the counts equal the initial ones, and nothing else is compared.
        counts, size = self._counts(), self.count
        if counts == self._unkept or not self._is_watched:
            return []
        for place, grad in enumerate(self.bound()):
            if grad is self.own[place]:
                counts[place] -= self._references_when_bound
        differ = list(map(ne, counts, self._unkept))
        return [place for place in range(size) if any(differ[place::size])]

    def reduce_into(
        self,
        write: Callable[..., object],
        divisor: float,
        staging: torch.Tensor | None,
        streams: Streams,
        reader: Stream,
        pack_stream: Stream,
    ) -> None:
        """Writes a reduction's average, or adds it to existing gradients.

        `write` writes the sum over ranks, divided, to a tensor like `flat`, or adds it there. If
        `flat` is on the host, `staging` is memory of the same kind on the mesh's device.

        Streams: on the current one, after `pack_stream` if memory is allocated there. The program
        reads kept gradients on `reader`.
        """
        if self._told is not None or self._brought is not None:  # of a reduction not yet joined
            self.decide()
        if self.awaiting_hooks:
            self.run_hooks()
        self._part_with_kept(reader)
        self.judged.clear()
        # Usually all gradients are None, after zero_grad(): overwriting saves one pass that zeroes
        # and one that reads.
        accumulate = not self.are_absent()
        if accumulate:
            # The reduction adds to all of the memory, so zero the places of gradients that are
            # None.
            for place, live in enumerate(self.settle()):
                if not live:
                    self._locals[place].zero_()
            # Hooks run only for parameters that get a gradient in this backward, not for those that
            # got one in an earlier one. `settle` sets the flags of the latter again.
            if not self.is_captured and any(p._post_accumulate_grad_hooks for p in self.params):
                self.flags.zero_()
                self.flagged = [False] * self.count
        # Allocated only now, so that it is not part of the peak at the loss.
        if self.memory is GradMemory.NONE:
            with streams.on(pack_stream):
                self.allocate(zeroed=False)
            streams.order(pack_stream, streams.current())
        if staging is None:
            write(self.flat, divisor=divisor, accumulate=accumulate)
            return
        if accumulate:
            # Adding on the device costs a copy to it, but the host need not wait during backward.
            staging.copy_(self.flat, non_blocking=True)
        write(staging, divisor=divisor, accumulate=accumulate)
        # Copy to the host, where the shard lives. The copy may run until `decide` has waited.
        self.flat.copy_(staging, non_blocking=self._home.pinned)
        self._brought = self._brought or streams.event()
        self._brought.record(streams.current())

    def bind(self, touched: tuple[bool, ...], streams: Streams) -> None:
        """Binds the gradients that any rank has `touched`; `decide` does, if this one lacks some.

        Streams: if some were not touched, copies the flags to the host on the current one.
        """
        # If this rank has a gradient for every parameter, other ranks can add none.
        if all(touched):
            self._bind(touched)
        elif self.is_captured:  # cannot read from the device
            self._bind(self._seen.get(touched, (True,) * len(touched)))
        else:
            flags, arrived = self.flags, self._brought
            if arrived is None:  # else they come along with the gradients
                flags = torch.empty_like(flags, device="cpu", pin_memory=flags.is_cuda)
                flags.copy_(self.flags, non_blocking=True)
                arrived = streams.event()
                arrived.record(streams.current())
            self._told = touched, flags, arrived

    def _bind(self, places: Sequence[bool]) -> None:
        self.flagged = list(places)
        for place, (param, live) in enumerate(zip(self.params, places, strict=True)):
            if not live:
                continue
            if self._gradient_of(param) is not self.own[place]:
                setattr(param, self.attribute, self.own[place])
            if param._post_accumulate_grad_hooks:
                self.awaiting_hooks.append(param)

    def run_hooks(self) -> None:
        """Runs the program's hooks on the gradients bound since the last call.

        Autograd never accumulates into sharded parameters, so it does not run their hooks. FSDP2
        runs them after its reduction, too. A hook may raise: its reduction is over, and the
        remaining hooks do not run, as in plain torch.
        """
        hooked, self.awaiting_hooks = self.awaiting_hooks, []
        for param in hooked:
            if self._brought is not None:
                self._brought.wait_on_host()
            with torch.no_grad():
                for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                    hook(param)

    @property
    def is_decided(self) -> bool:
        """True if `decide` has nothing left to do: then hooks have run, too."""
        return self._told is None and self._brought is None

    def decide(self) -> None:
        """Binds gradients if this rank lacks some. Blocks the host until the flags arrive.

        See [Note: Missed parameters].
        """
        told, self._told = self._told, None
        if told is not None:
            touched, flags, arrived = told
            arrived.wait_on_host()
            pairs = zip(touched, flags.tolist(), strict=True)
            seen = self._seen[touched] = tuple([here or flag > 0 for here, flag in pairs])
            # All at once, so that hooks run in the same order on every rank.
            self._bind(seen)
        if self._brought is not None:
            self._brought.wait_on_host()

    def unbind(self) -> None:
        """Sets the gradients of all parameters to None."""
        self._told, self.awaiting_hooks = None, []
        for param in self.params:
            setattr(param, self.attribute, None)

    # -- for readers of the shard

    def place_of(self, param: torch.Tensor) -> int | None:
        """Returns a parameter's place; None if it did not require grad when the last
        forward began.
        """
        return self._index.get(id(param))

    def groups(self, place: int) -> tuple[dist.ProcessGroup, ...]:
        """Returns the process groups that a gradient is sharded over.

        Read from the sharding, not from the parameter: torch treats equal meshes as one, so a
        parameter that the program has replaced may name an earlier mesh.
        """
        sharding = self._managed[place].sharding
        return groups_cut_over(sharding.mesh, sharding.placements)

    def bound(self) -> list[torch.Tensor | None]:
        """Returns the bound gradients of the parameters, in order; None where there is none."""
        return list(map(self._gradient_of, self.params))

    def are_absent(self) -> bool:
        """Returns whether no parameter has a gradient."""
        return not any(map(is_not, map(self._gradient_of, self.params), repeat(None)))

    def have_own_data(self) -> bool:
        """Returns False after `grad.data = dtensor`, which does not change the values in
        the shard.
        """
        return all(map(is_, storages_of(self.own), self._own_data))

    def settle(self) -> list[bool]:
        """Makes flags and values agree with the bound gradients.

        Clears the flag of a gradient that is now None, sets that of one which is bound again, and
        copies any other tensor into the shard.

        Returns:
            Per parameter, whether it has a gradient.

        Streams: on the current one. Capture: safe; the capture fixes which gradients are bound.

        Raises:
            ForeignParameterError: a gradient is not sharded like its parameter.
        """
        self.drop_stale_verdict()
        # In a steady step all bindings are unchanged, which one pass in C finds.
        if all(map(is_, map(self._gradient_of, self.params), self.own)) and all(self.flagged):
            return [True] * self.count
        # Read all gradients before writing one, because the program may have swapped them.
        gradients, foreign = self.bound(), []
        for i, grad in enumerate(gradients):
            if grad is None:
                if self.flagged[i]:
                    self.flags[i].zero_()
                    self.flagged[i] = False
            elif grad is not self.own[i]:
                foreign.append((i, self._require_sharded_alike(i, grad)))
            elif not self.flagged[i]:
                self.flags[i].fill_(1)
                self.flagged[i] = True
        if foreign:
            self._take_over(foreign)
        return [grad is not None for grad in gradients]

    def judge(self, nonfinite: torch.Tensor, places: Iterable[int]) -> None:
        """Stores a verdict on the gradients of these places, valid until the program writes to
        them.
        """
        versions = self._versions()
        for place in places:
            self.judged[place], self._judged_at[place] = nonfinite, versions[place]

    def verdicts(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the verdicts on the gradients of these parameters, each verdict once."""
        places = map(self._index.get, map(id, params))  # in C, since each step asks
        return list(dict.fromkeys([self.judged[each] for each in places if each in self.judged]))

    def _versions(self) -> list[int]:
        """Returns the version of each gradient, which changes with every write by the program."""
        with DisableTorchFunction():  # DTensors answer three times as fast
            of_all = list(map(_VERSION, self._watched))
        # A program may also write to the local tensor, through `to_local()`.
        return list(map(add, of_all, of_all[self.count :]))

    def drop_stale_verdict(self) -> None:
        """Drops the verdict on gradients that are None or replaced now, or were written since."""
        if self.judged:
            now, grads = self._versions(), self.bound()
            self.judged = {
                place: verdict
                for place, verdict in self.judged.items()
                if self._judged_at[place] == now[place] and grads[place] is self.own[place]
            }

    def _require_sharded_alike(self, index: int, grad: torch.Tensor) -> DTensor:
        own = self.own[index]
        if (
            not isinstance(grad, DTensor)
            or grad.placements != own.placements
            or grad.shape != own.shape
        ):
            raise ForeignParameterError(
                "a gradient was replaced by a tensor that is not sharded as its parameter",
                expected=f"None, or a DTensor of shape {tuple(own.shape)} with {own.placements}",
                got=f"{type(grad).__name__} of shape {tuple(grad.shape)}",
                where=self._name(index),
                fix="assign None, or change the gradient in place",
            )
        return grad

    def _name(self, place: int) -> str:
        return f"parameter {self._managed[place].name} on rank {dist.get_rank()}"

    def _take_over(self, foreign: Sequence[tuple[int, DTensor]]) -> None:
        """Copies assigned gradients into the shard and binds the shard's own instead."""
        self.allocate()
        # The program may have swapped gradients, in this model or between two, so memory that is
        # about to be overwritten may be another parameter's new gradient.
        if not self._is_persistent:
            if places := {place for place, _ in foreign}.intersection(self.kept_places()):
                self._part_with(sorted(places), self.current_stream())
        elif shared := [place for place, grad in foreign if _is_slice(local_of(grad))]:
            raise ForeignParameterError(
                "a gradient was replaced by memory of another gradient, which is reused under "
                "GradientPolicy(persistent=True)",
                expected="a tensor with memory of its own",
                got=f"another gradient, or a view of one, for {len(shared)} parameters",
                where=self._name(shared[0]),
                fix="assign its clone(), or persistent=False",
            )
        for place, grad in foreign:
            with torch.no_grad():
                local = grad.to_local()
                self._locals[place].copy_(local)
                # The local tensor is dropped next, while the current stream still reads it. The
                # allocator does not know gradients in former memory.
                if _is_slice(local):
                    self.read.append(local)
                else:
                    keep_for_current_stream(local)
                self.flags[place].fill_(1)
            self.flagged[place] = True
            setattr(self.params[place], self.attribute, self.own[place])

    # -- for graphs

    def host_state(self) -> HostState:
        """Returns what the host knows about the gradients; their values stay in device memory."""
        self.drop_stale_verdict()
        pairs = zip(self.bound(), self.own, strict=True)
        bound = tuple([OWN if grad is own else grad for grad, own in pairs])
        return bound, dict(self.judged), tuple(self.flagged)

    def restore(self, state: HostState) -> None:
        """Restores the host's knowledge of `state`; does not change device memory."""
        bound, judged, flagged = state
        self.judged, self.flagged = dict(judged), list(flagged)
        self._judged_at = self._versions()
        for param, own, what in zip(self.params, self.own, bound, strict=True):
            grad = own if what is OWN else what
            if self._gradient_of(param) is not grad:
                setattr(param, self.attribute, grad)

    def zero(self, places: Sequence[int]) -> None:
        """Zeroes the gradients that are not None, as `zero_grad(set_to_none=False)` does.

        A verdict of NaN is dropped once all its gradients have been zeroed; an optimizer does this
        group by group.
        """
        live = self.settle()
        for place in places:
            if live[place]:
                self._locals[place].zero_()
