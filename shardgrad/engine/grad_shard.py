"""The gradient shard: one flat buffer per group whose views are the parameters' gradients.

[Note: Gradient binding]
Each parameter's gradient is one DTensor, over one place of the shard, until the program keeps it. A
reduction overwrites it if it is None, else adds to it. A gradient that is another tensor (assigned
by hand, or accumulated by autograd through a DTensor operation) is copied into the shard and the
binding restored. A parameter that got no gradient on any rank stays None.

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

[Note: Live flags]
Kernels that read the shard (norms, optimizers) do not look at `param.grad`, but at one element per
parameter behind the gradients: above zero, the parameter is *live*. A reduction brings these flags
along ([Note: Touched flags] in `grad_group.py`); a gradient that the program sets to None, or
assigns, is noted there by `settle` before a kernel looks.

[Note: Verdicts]
A norm that has found whether gradients are finite leaves its verdict here, for optimizers and loss
scalers. It belongs to a version of each gradient: a reduction, and a write by the program, which
moves the version (torch's `zero_grad(set_to_none=False)`, `grad.mul_()`), end it.

[Note: Memory of gradients]
Where all gradients of a shard are None, its memory would only raise the peak, which is often at the
loss. So on a device the outermost forward frees it, and the next reduction allocates it again, both
on the stream that packs. Memory that a graph reads or writes is kept at its address, and so is that
of the CPU, where new pages cost more, and that of a `GradientPolicy(persistent=True)`. A graph in
which gradients are None at both ends has its own: see `graphs/engine_state.py`.

[Note: Missed parameters]
The flags say whether another rank had a gradient that this one has missed. They are copied to the
host after the reduction, and read once all of a backward is launched: the host does not wait
before. A capture forbids it: what the host saw in an eager step with the same gradients on this
rank stands in; if it saw none, every parameter counts as having one, and the flags on the device
decide at each replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from itertools import repeat
from operator import add, attrgetter, gt, is_, is_not, ne
from typing import cast

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.tensor import DTensor

from shardgrad.engine.param import FSDPParam
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.streams import Stream, StreamEvent, Streams, keep_for_current_stream
from shardgrad.errors import ForeignParameterError
from shardgrad.sharding.dtensor import dtensor_like, in_own_storage, storages_of
from shardgrad.sharding.layout import Piece, ShardLayout
from shardgrad.sharding.param_sharding import groups_cut_over

__all__ = ["GradMemory", "GradShard", "HostState"]

# What is bound to a parameter: its gradient in the shard, None, or a tensor that the program has
# assigned.
OWN = True
Bound = bool | torch.Tensor | None

# Per parameter, what is bound; `nonfinite`, and of which places; per parameter, what the flag says.
HostState = tuple[tuple[Bound, ...], torch.Tensor | None, frozenset[int], tuple[bool, ...]]


_VERSION = attrgetter("_version")
_uses_of: Callable[[int], int] = torch._C._storage_Use_Count


def _references_when_bound() -> int:
    """Returns how many references to a tensor's object a `.grad` is, which depends on torch's
    version.
    """
    param, grad = torch.zeros(1), torch.zeros(1)
    before = sys.getrefcount(grad)
    param.grad = grad
    return sys.getrefcount(grad) - before


class GradMemory(Enum):
    """Whether a shard has memory. See [Note: Memory of gradients]."""

    NONE = auto()  # all gradients are None
    HELD = auto()  # it may be freed while all gradients are None
    # It stays at its address; only that of a graph's own pool is freed, by the graph.
    FIXED = auto()


class GradShard:
    """Gradients of one group on one rank.

    `layout` has a tail; for `home` see [Note: Shards on the host] in `sharding/offload.py`.

    Attributes:
        flat: the memory, 1-D; without elements if there has been none.
        values: the gradients in it, with zeros between them.
        flags: [Note: Live flags].
        own: the gradients, which exist without memory, too.
        views: of the memory, for each parameter, in its local shape.
        is_captured: a graph is being captured; see `look`.
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
        self._layout = layout
        self.attribute = policy.attribute  # of a parameter: what its gradient is bound to
        self._is_persistent = policy.persistent
        self.mesh = group.mesh
        self._home = home
        self._brought: StreamEvent | None = None
        self.memory = GradMemory.NONE
        self.stream: Stream = None  # that memory is allocated on; None on the CPU
        self.is_captured = False
        self._allocated: StreamEvent | None = None
        self._nothing = home.zeros(0, dtype)
        self.touched: tuple[bool, ...] = ()  # on this rank, in the last reduction; empty before it
        # Float32 device scalar, above zero if an infinity or a NaN was found; None if nothing has
        # looked.
        self.nonfinite: torch.Tensor | None = None
        self._index = {id(param): i for i, param in enumerate(self.params)}
        # What the flags say, as far as the host has made sure.
        self.flagged = [False] * len(self.params)
        self._seen: dict[tuple[bool, ...], tuple[bool, ...]] = {}
        # The places that `nonfinite` is of, and the version of each gradient that was looked at.
        self.judged: dict[int, int] = {}
        # A reduction that adds, if parameters have hooks.
        self._flags_before: torch.Tensor | None = None
        # Flags for `decide`, and their arrival.
        self._told: tuple[torch.Tensor, StreamEvent] | None = None
        self.read: list[torch.Tensor] = []  # until the program's stream waits for a reduction
        for param in self.params:
            if policy.decoupled:
                setattr(param, self.attribute, getattr(param, self.attribute, None))
            elif param.dtype != dtype:
                param.grad_dtype = dtype
        self._gradient_of = attrgetter(self.attribute)
        self._references_when_bound = 1 if policy.decoupled else _references_when_bound()
        # Tensors of the meta device, and fake ones, have the storage of the flat memory.
        self._is_watched = bool(params) and self._nothing.untyped_storage().device.type != "meta"
        self._overwritten: list[int] = []
        self._placed: tuple[int, int] | None = None  # storage and address
        self._locals = [self._nothing] * self.count
        self.own = [cast(DTensor, param) for param in self.params]
        self._renew(range(self.count))
        self.place_in(self._nothing)
        # While nothing else refers to them; later objects have the same.
        self._unkept = self._counts()

    def _renew(self, places: Iterable[int]) -> None:
        """Makes new gradients for these places, without memory."""
        for place in places:
            local = self._locals[place] = self._nothing.new_empty(0)
            self.own[place] = dtensor_like(local, cast(DTensor, self.params[place]))

    # -- memory: see the note

    def place_in(self, flat: torch.Tensor) -> None:
        """Points the gradients to 1-D memory, whose storage comes and goes, in a storage of its own
        each, as `in_own_storage` says why. Without elements it is none.

        Memory that was gone and is back at its address costs nothing.
        """
        memory = flat.untyped_storage()
        placed = memory._cdata, memory.data_ptr() if self._is_watched else 0
        if self._placed == placed:
            return
        layout, self.flat, self._placed = self._layout, flat, placed
        numel, count = (layout.tail_offset, len(layout.pieces)) if flat.numel() else (0, 0)
        self.values, self.flags = flat.narrow(0, 0, numel), flat.narrow(0, numel, count)
        self.views = layout.local_views(flat, self.mesh.shard_rank) if count else []
        for place, view in enumerate(self.views or [self._nothing] * self.count):
            if self._is_watched:
                self._locals[place].set_(in_own_storage(view))  # type: ignore[call-overload]
            else:
                self._locals[place] = self.own[place]._local_tensor = view.data
        self._watched: list[torch.Tensor] = [*self.own, *self._locals]
        self._storages = [local.untyped_storage()._cdata for local in self._locals]
        self._own_data = storages_of(self.own)

    def allocate(self, *, zeroed: bool = True) -> None:
        """Gets memory, if there is none; it is zeroed, or else the caller writes all of it.

        Streams: allocated for the current one, and zeroed there. Capture: safe after `look`.
        """
        if self.memory is not GradMemory.NONE:
            return
        numel = self._layout.chunk_numel
        self.stream = self.current_stream()
        stays = self._is_persistent or self._home.is_offloaded or self._home.is_virtual
        may_go = self.stream is not None and not (stays or self.is_captured)
        flat = self.flat
        with torch.inference_mode(mode=False):  # a step in inference mode may be the first
            if flat.numel():
                flat.untyped_storage().resize_(flat.nbytes)
                if zeroed:
                    flat.zero_()
            elif zeroed or not may_go:
                flat = self._home.zeros(numel, flat.dtype)
            else:
                flat = self._nothing.new_empty(numel)
            self.place_in(flat)
        self.memory = GradMemory.HELD if may_go else GradMemory.FIXED

    def fix(self) -> None:
        """Keeps memory at its address from now on, allocated if there is none: a graph will know
        it.
        """
        self.allocate()
        self.memory = GradMemory.FIXED

    def look(self, *, is_captured: bool) -> None:
        """Notes whether what follows is captured: a graph that meets memory knows its address.

        Called where a forward opens, a reduction starts, or an optimizer looks at the gradients.
        """
        self.is_captured = is_captured
        if is_captured and self.memory is GradMemory.HELD:
            self.memory = GradMemory.FIXED

    @property
    def has_memory(self) -> bool:
        """False if all gradients are None and their memory was freed, or there was none yet."""
        return self.memory is not GradMemory.NONE

    def free(self, reader: Stream) -> None:
        """Frees the memory, or leaves it to the program, which reads on `reader`, if that keeps
        any of it; gradients are None.

        Streams: `self.stream` comes after all uses.
        """
        if self.memory is GradMemory.NONE:
            return
        self._forget_verdict(range(self.count))
        self.flagged = [False] * self.count
        kept = self.held()
        if kept:
            self._record(reader)
            self._renew(kept)
            self.place_in(self._nothing)
        else:
            self.flat.untyped_storage().resize_(0)
        self.memory = GradMemory.NONE

    def current_stream(self) -> Stream:
        """Returns the stream that is current on the memory's device; None on the CPU."""
        device = self._nothing.device
        is_host = device.type in ("cpu", "meta")
        return None if is_host else torch.accelerator.current_stream(device)

    def _record(self, reader: Stream) -> None:
        """Tells the allocator that the program, which keeps the memory, reads it on `reader`."""
        if reader is not None and self.flat.device.type != "cpu":
            self.flat.record_stream(reader)

    # -- before and after a reduction

    def _prepare(self, reader: Stream) -> bool:
        """Makes the shard ready for a reduction; returns False if that should overwrite everything,
        not add.

        To add, gradients that are None are zeroed first, and foreign ones taken over, on the
        current stream.
        """
        self.decide()
        self._part_with_kept(reader)
        self._forget_verdict(range(self.count))
        # The common case after zero_grad(): the reduction overwrites, which saves a pass that
        # zeroes and one that reads.
        if self.are_absent():
            return False
        # The pass adds to all of the memory, and what is None counts as zero.
        for i, live in enumerate(self.settle()):
            if not live:
                self.view(i).zero_()
        if not self.is_captured and any(p._post_accumulate_grad_hooks for p in self.params):
            self._flags_before = self.flags.clone()
        return True

    def _part_with_kept(self, reader: Stream) -> None:
        """Before memory is written: [Note: Kept gradients]. The program reads on `reader`.

        In a capture, it is noted what each replay has to part with.
        """
        if self._is_persistent or self.memory is GradMemory.NONE:
            return
        if self.is_captured:
            absent = enumerate(self.bound())
            self._overwritten += [place for place, grad in absent if grad is None]
        elif held := self.held():
            # A gradient that is bound may be held as well: it is added to, and meant to change.
            bound = self.bound()
            if kept := [place for place in held if bound[place] is None]:
                self._part_with(kept, reader)

    def _part_with(self, places: Sequence[int], reader: Stream) -> None:
        """Makes the memory of these places one that the program holds nothing of."""
        if self.are_absent():
            self.free(reader)
        else:
            self._record(reader)
            self.stream = self.current_stream()
            with torch.inference_mode(mode=False):
                self._renew(places)
                self.place_in(self._home.zeros(self.flat.numel(), self.flat.dtype).copy_(self.flat))

    def _counts(self) -> list[int]:
        """Returns how often gradients, then local tensors and storages are referred to."""
        return [*map(sys.getrefcount, self._watched), *map(_uses_of, self._storages)]

    def held(self) -> list[int]:
        """Returns the places of which the program holds more than the gradient that is bound."""
        # In a steady step the counts are those of the beginning, and nothing else is looked at.
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
        """Writes a reduction's average, or adds it where there are gradients; see
        `PendingSum.write`.

        Streams: on the current one, after `pack_stream` if memory is allocated there; the program
        reads what it keeps on `reader`. `staging` is memory like `flat` on the mesh's device, if
        `flat` lies on the host.
        """
        accumulate = self._prepare(reader)
        # Memory comes as late as this, so that the peak at the loss has none of it.
        if self.memory is GradMemory.NONE:
            with streams.on(pack_stream):
                self.allocate(zeroed=False)
            self._allocated = self._allocated or streams.event()
            self._allocated.record(pack_stream)
            self._allocated.wait(streams.current())
        if staging is None:
            write(self.flat, divisor=divisor, accumulate=accumulate)
            return
        if accumulate:
            # Adding on the device costs a copy there, and no wait of the host in the middle of
            # backward.
            staging.copy_(self.flat, non_blocking=True)
        write(staging, divisor=divisor, accumulate=accumulate)
        # To the host, where the shard lives; the copy goes on after the return, until
        # `wait_on_host`.
        self.flat.copy_(staging, non_blocking=self._home.pinned)
        self._brought = self._brought or streams.event()
        self._brought.record(streams.current())

    def wait_on_host(self) -> None:
        """Makes the host wait for gradients on their way to it, if any are."""
        if self._brought is not None:
            self._brought.wait_on_host()

    def bind(self, touched: tuple[bool, ...], streams: Streams) -> None:
        """Binds the gradients that were `touched` on this rank, and runs hooks; `decide` binds the
        others.

        Streams: if some were not, the flags are copied to the host on the current one.
        """
        self.touched = touched
        before, self._flags_before = self._flags_before, None
        # Parameters with hooks: which of them got a gradient just now, and not in an earlier
        # backward, has to be known before the hooks run, so the host waits.
        if before is not None:
            self.wait_on_host()
            self.flagged = self._read(self.flags)
            self._bind((self.flags != before).tolist())
            return
        # Where this rank has a gradient of every parameter, the others can add none.
        self.flagged = list(touched)
        if not all(touched) and self.is_captured:
            self.flagged = list(self._seen.get(touched, (True,) * len(touched)))
        elif not all(touched):
            self._told = self._bring_flags(streams)
        self._bind(self.flagged)

    def _bind(self, places: Sequence[bool]) -> None:
        for place, (param, live) in enumerate(zip(self.params, places, strict=True)):
            if not live:
                continue
            if self._gradient_of(param) is not self.own[place]:
                setattr(param, self.attribute, self.own[place])
            # Autograd, which would run them, never accumulates here; FSDP2 runs them after its
            # reduction too.
            hooks = param._post_accumulate_grad_hooks
            if hooks:
                self.wait_on_host()
                with torch.no_grad():
                    for hook in list(hooks.values()):
                        hook(param)

    def _bring_flags(self, streams: Streams) -> tuple[torch.Tensor, StreamEvent]:
        if self._brought is not None:  # along with the gradients
            return self.flags, self._brought
        arrived = streams.event()
        flags = torch.empty_like(self.flags, device="cpu", pin_memory=self.flags.is_cuda)
        flags.copy_(self.flags, non_blocking=True)
        arrived.record(streams.current())
        return flags, arrived

    def decide(self) -> None:
        """Binds what other ranks alone had; the host waits for what comes: [Note: Missed
        parameters].
        """
        told, self._told = self._told, None
        if told is not None:
            flags, arrived = told
            arrived.wait_on_host()
            self.flagged = self._read(flags)
            # What this rank had a gradient for is bound already.
            self._bind(list(map(gt, self.flagged, self.touched)))
        self.wait_on_host()

    def _read(self, flags: torch.Tensor) -> list[bool]:
        """Returns which parameters were touched on some rank, and remembers it for captures."""
        touched = [
            here or flag > 0 for here, flag in zip(self.touched, flags.tolist(), strict=True)
        ]
        # A capture cannot ask the device: it takes the answer of the eager step that had the same
        # gradients on this rank.
        self._seen[self.touched] = tuple(touched)
        return touched

    def unbind(self) -> None:
        """Forgets the gradients: each parameter's becomes None."""
        self._told = None
        for param in self.params:
            setattr(param, self.attribute, None)

    # -- for those who read the shard

    def place_of(self, param: torch.Tensor) -> int | None:
        """Returns a parameter's place, or None if it did not require grad when the last forward
        began.
        """
        return self._index.get(id(param))

    def piece(self, place: int) -> Piece:
        """Returns where a gradient lies in `flat`."""
        return self._layout.pieces[place]

    def groups(self, place: int) -> tuple[dist.ProcessGroup, ...]:
        """Returns the groups of ranks that a gradient is cut over. Torch takes equal meshes for
        one, so what a program has put in a parameter's place may name a mesh of before.
        """
        sharding = self._managed[place].sharding
        return groups_cut_over(sharding.mesh, sharding.placements)

    def view(self, place: int) -> torch.Tensor:
        """Returns a parameter's part of `flat`, in the local shape."""
        return self.views[place]

    @property
    def numel(self) -> int:
        """Elements of `values`."""
        return self._layout.tail_offset

    def bound(self) -> list[torch.Tensor | None]:
        """Returns what is bound to the parameters, in order."""
        return list(map(self._gradient_of, self.params))

    def are_absent(self) -> bool:
        """Returns whether no parameter has a gradient."""
        return not any(map(is_not, map(self._gradient_of, self.params), repeat(None)))

    def have_own_data(self) -> bool:
        """Returns False after `grad.data = dtensor`, which leaves the values as they were."""
        return all(map(is_, storages_of(self.own), self._own_data))

    def settle(self) -> list[bool]:
        """Makes flags and values agree with what is bound; returns which parameters have a
        gradient.

        The flag of a gradient that is None now is cleared, and that of one which is back is set.
        Any other tensor is copied into the shard.

        Streams: on the current one. Capture: safe; what is bound is a fact of the host, fixed by
        the capture.

        Raises:
            ForeignParameterError: a gradient is not sharded like its parameter.
        """
        if self.judged:
            now = self._versions()
            self._forget_verdict([at for at, was in self.judged.items() if was != now[at]])
        # In a steady step every gradient is bound as it was: one pass in C over however many there
        # are.
        if all(map(is_, map(self._gradient_of, self.params), self.own)) and all(self.flagged):
            return [True] * self.count
        # All gradients are read before one is written: they may have changed places.
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
        live = [grad is not None for grad in gradients]
        self._forget_verdict(i for i, has in enumerate(live) if not has)
        return live

    def judge(self, nonfinite: torch.Tensor | None, places: Iterable[int]) -> None:
        """Keeps a verdict on the gradients of these places, until the program writes to them."""
        self.nonfinite = nonfinite
        versions = self._versions()
        self.judged.update((place, versions[place]) for place in places)

    def _versions(self) -> list[int]:
        """Returns the version of each gradient, which moves with every write by the program."""
        with DisableTorchFunctionSubclass():  # DTensors answer three times as fast
            of_all = list(map(_VERSION, self._watched))
        # A program may also write through `to_local()`.
        return list(map(add, of_all, of_all[self.count :]))

    def _forget_verdict(self, places: Iterable[int]) -> None:
        """Forgets whether gradients that are gone, zeroed or written again were finite."""
        for place in places:
            self.judged.pop(place, None)
        if not self.judged:
            self.nonfinite = None

    def _require_sharded_alike(self, index: int, grad: torch.Tensor) -> DTensor:
        own = self.own[index]
        if (
            not isinstance(grad, DTensor)
            or grad.placements != own.placements
            or grad.shape != own.shape
        ):
            raise ForeignParameterError(
                "a gradient was replaced by a tensor that is not sharded like its parameter",
                expected=f"None, or a DTensor of shape {tuple(own.shape)} with {own.placements}",
                got=f"{type(grad).__name__} of shape {tuple(grad.shape)}",
                where=self._name(index),
                fix="assign None, or change the gradient in place",
            )
        return grad

    def _name(self, place: int) -> str:
        return f"parameter {self._managed[place].name} on rank {dist.get_rank()}"

    def _take_over(self, foreign: Sequence[tuple[int, DTensor]]) -> None:
        """Copies assigned gradients into the shard, and binds the shard's own in their place."""
        self.allocate()
        self._forget_verdict(range(self.count))
        if not self.is_captured:
            # Gradients may have changed places, in this model or between two: what is written over
            # may be what another parameter has been given.
            places = {place for place, _ in foreign}.intersection(self.held())
            if places and self._is_persistent:
                raise ForeignParameterError(
                    "a gradient was assigned where the program keeps the one of before, whose "
                    "memory GradientPolicy(persistent=True) does not leave to it",
                    expected="gradients that are changed in place",
                    got=f"another gradient for {len(places)} parameters",
                    where=self._name(min(places)),
                    fix="param.grad.copy_(other), or persistent=False",
                )
            if places:
                self._part_with(sorted(places), self.current_stream())
        for place, grad in foreign:
            with torch.no_grad():
                local = grad.to_local()
                self.view(place).copy_(local)
                # It is dropped next, while the current stream reads it. Of a part of a storage, as
                # gradients of former memory are, the allocator knows nothing.
                if local.untyped_storage().resizable():
                    keep_for_current_stream(local)
                else:
                    self.read.append(local)
                self.flags[place].fill_(1)
            self.flagged[place] = True
            setattr(self.params[place], self.attribute, self.own[place])

    # -- for graphs

    def begin_capture(self) -> list[int]:
        """Returns a list to which the capture that begins adds what each replay overwrites."""
        self._overwritten = []
        return self._overwritten

    def host_state(self) -> HostState:
        """Returns what the host knows of the gradients; their values are in device memory."""
        pairs = zip(self.bound(), self.own, strict=True)
        bound = tuple([OWN if grad is own else grad for grad, own in pairs])
        return bound, self.nonfinite, frozenset(self.judged), tuple(self.flagged)

    def restore(self, state: HostState) -> None:
        """Makes the host know what it knew when `state` was read; device memory is not touched."""
        bound, nonfinite, judged, flagged = state
        self.judged, self.flagged = {}, list(flagged)
        self.judge(nonfinite, judged)
        for param, own, what in zip(self.params, self.own, bound, strict=True):
            grad = own if what is OWN else what
            if self._gradient_of(param) is not grad:
                setattr(param, self.attribute, grad)

    def zero(self, places: Sequence[int]) -> None:
        """Zeroes gradients that are not None, as `zero_grad(set_to_none=False)` does.

        A NaN that was found is forgotten once all have been zeroed (an optimizer does it group by
        group).
        """
        live = self.settle()
        chosen = [place for place in places if live[place]]
        self._forget_verdict(chosen)
        for place in chosen:
            self.view(place).zero_()
