"""The gradient shard: one persistent flat buffer per group whose views are the parameters' gradients.

[Note: Gradient binding]
Each parameter's gradient is one DTensor, made once, over one address, for the life of the model. `None`
keeps its meaning: a parameter whose gradient is None when a reduction lands is overwritten, any other is
added to; nothing is allocated in either case. A gradient that is somebody else's tensor (assigned by hand,
or accumulated by autograd through a DTensor operation) is copied into the shard and the binding restored.
A parameter that got no gradient on any rank stays None.

[Note: Live flags]
Kernels that read the shard (norms, optimizers) do not look at `param.grad`: behind the gradients the shard
has one element per parameter, and a parameter is *live* if its element is above zero. A reduction brings
these flags along ([Note: Touched flags] in `scheduler.py`); a gradient that the program sets to None, or
assigns, is noted there by `settle` before a kernel looks.

[Note: None under a graph]
Whether a parameter without a gradient on this rank had one on another is read by the host, which a capture
forbids. There, what the host saw in an eager step with the same gradients on this rank stands in; if it saw
none, every parameter counts as having one, and the flags on the device decide at each replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad import ops
from shardgrad.engine.pending_scale import ScaledGradient
from shardgrad.engine.streams import StreamEvent, Streams, is_capturing
from shardgrad.errors import ForeignParameterError
from shardgrad.policies import GradientPolicy
from shardgrad.sharding.dtensor import dtensor_like, in_own_storage
from shardgrad.sharding.layout import Piece, ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.offload import ShardMemory
from shardgrad.sharding.param_sharding import groups_cut_over

__all__ = ["Binding", "GradFacts", "GradShard", "PendingSum"]

_FLAGGED = attrgetter("_flagged")
_PENDING = attrgetter("pending_scale", "nonfinite")


@dataclass(frozen=True)
class Binding:
    """What the host holds about a gradient shard; the values are in device memory.

    Attributes:
        gradients: what is bound to each parameter.
        pending_scale, nonfinite: as in `GradShard`.
        flagged: what the flags say, as far as the host knows.
    """

    gradients: tuple[torch.Tensor | None, ...]
    pending_scale: torch.Tensor | None
    nonfinite: torch.Tensor | None
    flagged: tuple[bool, ...]


class PendingSum:
    """What adds up to a chunk, and has not been added up yet: for each range of it, what comes from where.

    Args:
        ranges: the first element of each, how many it has, and its summands: 1-D, as long as the range.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, Sequence[torch.Tensor]]]) -> None:
        self._ranges = ranges

    def plus(self, chunk: torch.Tensor) -> PendingSum:
        """Returns this and a whole chunk more."""
        return PendingSum(
            [
                (begin, numel, [*summands, chunk.narrow(0, begin, numel)])
                for begin, numel, summands in self._ranges
            ]
        )

    def write(self, out: torch.Tensor, *, divisor: float = 1.0, accumulate: bool = False) -> None:
        """Computes the sum; see `ops.sum_chunks`, which takes the same arguments.

        Args:
            out: the whole chunk. It may be among the summands, each range in its place.
            divisor: what the sum is divided by.
            accumulate: add to what `out` holds.

        Streams: on the current one. Capture: safe.
        """
        for begin, numel, summands in self._ranges:
            part = out if numel == out.numel() else out.narrow(0, begin, numel)
            ops.sum_chunks(summands, part, divisor=divisor, accumulate=accumulate)


class GradShard:
    """Persistent gradients of one group on one rank.

    Args:
        params: the group's trainable sharded parameters, in layout order.
        layout: their places, with a tail.
        mesh: gives rank and placements.
        dtype: of the shard.
        policy: where gradients are bound.
        home: where the shard lives; see [Note: Shards on the host] in `sharding/offload.py`.

    Attributes:
        flat: 1-D, `layout.chunk_numel` elements of `dtype`, at home.
        values: the part of `flat` that holds gradients; zero between them.
        flags: the part of `flat` with one element per parameter. See [Note: Live flags].
        mesh: as given.
        needs_staging: True if the shard is not on the mesh's device, where a reduction then needs room.
        pending_scale: device scalar (float32) that every gradient is still to be multiplied by, or None.
            See [Note: Pending scale] in `pending_scale.py`.
        touched: per parameter, whether this rank had a gradient in the last reduction; empty before it.
        nonfinite: device scalar (float32), above zero if a norm or a loss scaler found an infinity or a NaN
            in the gradients it looked at, these among them; None if nobody has looked.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: ShardLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        policy: GradientPolicy,
        home: ShardMemory,
    ) -> None:
        self._params = list(params)
        self._layout = layout
        self._attribute = policy.attribute
        self._read = attrgetter(policy.attribute)
        self.mesh = mesh
        self._home = home
        self.needs_staging = home.is_offloaded
        self._brought: StreamEvent | None = None
        self.flat = home.zeros(layout.chunk_numel, dtype)
        self.values = self.flat.narrow(0, 0, layout.tail_offset)
        self.flags = self.flat.narrow(0, layout.tail_offset, len(layout.pieces))
        self.touched: tuple[bool, ...] = ()
        self.pending_scale: torch.Tensor | None = None
        self.nonfinite: torch.Tensor | None = None
        self._views = layout.local_views(self.flat, mesh.shard_rank)
        self._dtensors = [
            dtensor_like(in_own_storage(view), cast(DTensor, param))
            for param, view in zip(self._params, self._views, strict=True)
        ]
        self._scaled = [ScaledGradient(dtensor, self.apply_scale) for dtensor in self._dtensors]
        self._tables: dict[tuple[int, ...], tuple[torch.Tensor, int]] = {}
        self._spreads: dict[tuple[int, ...], dict[tuple[dist.ProcessGroup, ...], tuple[int, ...]]] = {}
        self._index = {id(param): i for i, param in enumerate(self._params)}
        # What the flags in device memory say, as far as the host has made sure of it.
        self._flagged = [False] * len(self._params)
        self._seen: dict[tuple[bool, ...], list[bool]] = {}
        self._own = {id(None), *map(id, self._dtensors), *map(id, self._scaled)}
        for param in self._params:
            if policy.decoupled:
                setattr(param, self._attribute, getattr(param, self._attribute, None))
            elif param.dtype != dtype:
                param.grad_dtype = dtype

    # -- before and after a reduction -------------------------------------------------------------------

    def prepare(self) -> bool:
        """Makes the shard ready to be written by a reduction.

        Returns:
            False if the reduction should overwrite everything (every gradient is None), else True: it should
            add. Gradients that are None are then zeroed, and foreign ones taken over, first.

        Streams: writes, if any, go to the current stream.
        """
        self.wait_on_host()
        self.nonfinite = None
        if not any(map(is_not, map(self._read, self._params), repeat(None))):
            self.pending_scale = None
            return False
        self.apply_scale()
        for i, live in enumerate(self.settle(range(len(self._params)))):
            if not live:
                self._views[i].zero_()
        return True

    def reduce_into(
        self,
        pending: PendingSum,
        divisor: float,
        touched: tuple[bool, ...],
        staging: torch.Tensor | None,
        streams: Streams,
    ) -> None:
        """Writes a reduction's average, or adds it where there are gradients already, and binds it.

        Args:
            pending: the sum, like `flat`.
            divisor: what the sum is divided by.
            touched: per parameter, whether this rank had a gradient.
            staging: memory like `flat` on the mesh's device, if `needs_staging`.
            streams: of the root.

        Streams: on the current one.
        """
        accumulate = self.prepare()
        if staging is not None and accumulate:
            staging.copy_(self.flat, non_blocking=True)
        out = self.flat if staging is None else staging
        pending.write(out, divisor=divisor, accumulate=accumulate)
        if staging is not None:
            self._bring(staging, streams)
        self.bind(touched)

    def _bring(self, landing: torch.Tensor, streams: Streams) -> None:
        """Copies gradients from the device to the host, where they live.

        Args:
            landing: like `flat`, on the mesh's device.
            streams: of that device.

        Streams: on the current one; the copy goes on after the return, until `wait_on_host`.
        """
        self.flat.copy_(landing, non_blocking=self._home.pinned)
        self._brought = self._brought or streams.event()
        self._brought.record(streams.current())

    def wait_on_host(self) -> None:
        """Makes the host wait for gradients on their way to it, if any are."""
        if self._brought is not None:
            self._brought.wait_on_host()

    def bind(self, touched: Sequence[bool]) -> None:
        """Binds the gradient of every parameter that was touched on some rank, and runs its hooks.

        Args:
            touched: per parameter, whether it got a gradient on this rank. Where it did not, the reduced
                flags tell whether another rank had one; only then does the host read the shard, and not in a
                capture. See [Note: None under a graph].
        """
        anywhere = list(touched) if all(touched) else self._touched_anywhere(tuple(touched))
        self._flagged = list(anywhere)
        self.touched = tuple(touched)
        for param, dtensor, live in zip(self._params, self._dtensors, anywhere, strict=True):
            if not live:
                continue
            if getattr(param, self._attribute, None) is not dtensor:
                setattr(param, self._attribute, dtensor)
            # torch keeps these hooks for autograd's own accumulation, which the sharded parameter never
            # sees; FSDP2 runs them after its reduction too.
            hooks = param._post_accumulate_grad_hooks
            if hooks:
                self.wait_on_host()
                for hook in list(hooks.values()):
                    hook(param)

    def _touched_anywhere(self, touched: tuple[bool, ...]) -> list[bool]:
        if is_capturing(self.flat.device):
            return self._seen.get(touched, [True] * len(touched))
        self.wait_on_host()
        flags = self.flags.tolist()
        self._seen[touched] = [here or flag > 0 for here, flag in zip(touched, flags, strict=True)]
        return self._seen[touched]

    def unbind(self) -> None:
        """Forgets the gradients: each parameter's becomes None."""
        for param in self._params:
            setattr(param, self._attribute, None)

    # -- for those who read the shard -------------------------------------------------------------------

    def place_of(self, param: nn.Parameter) -> int | None:
        """Returns the parameter's index in the layout and among the flags.

        None for a parameter that did not require grad when the last forward began.
        """
        return self._index.get(id(param))

    def piece(self, place: int) -> Piece:
        """Returns where a gradient lies in `flat`."""
        return self._layout.pieces[place]

    def view(self, place: int) -> torch.Tensor:
        """Returns a parameter's part of `flat`, in the local shape."""
        return self._views[place]

    @property
    def count(self) -> int:
        """Number of parameters with a place."""
        return len(self._params)

    def table(self, places: tuple[int, ...]) -> tuple[torch.Tensor, int]:
        """Returns the table, on the device, with which a norm reads these gradients; see `ops.segment_rows`.

        Capture: safe after the first call for these places.
        """
        table = self._tables.get(places)
        if table is None:
            pieces = [
                (0, self.piece(place).shard_offset, 0, self._views[place].numel(), 0, place)
                for place in places
            ]
            rows, tiles = ops.segment_rows(pieces)
            limits = {"grad_numel": self.values.numel(), "touched_numel": self.flags.numel()}
            ops.check_rows(rows, tiles, **limits)
            table = self._tables[places] = rows.to(self.flat.device), tiles
        return table

    def spread(self, places: tuple[int, ...]) -> dict[tuple[dist.ProcessGroup, ...], tuple[int, ...]]:
        """Returns these places by the groups of ranks over which their gradients are cut.

        All are cut over the mesh's shard group; those of tensor-parallel parameters over others as well.
        """
        found = self._spreads.get(places)
        if found is None:
            together: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
            for place in places:
                together.setdefault(groups_cut_over(self._dtensors[place]), []).append(place)
            found = self._spreads[places] = {groups: tuple(own) for groups, own in together.items()}
        return found

    def settle(self, places: Sequence[int]) -> list[bool]:
        """Makes flags and values agree with what the program has bound to the parameters.

        The flag of a gradient that is None now is cleared; somebody else's tensor is copied into the shard.

        Returns:
            Per place, whether the parameter has a gradient.

        Streams: writes, if any, go to the current stream.
        Capture: safe; what is bound is a fact of the host and fixed by the capture.

        Raises:
            ForeignParameterError: a gradient is not sharded like its parameter.
        """
        # In a steady step every gradient is bound as it was: one pass in C over however many there are.
        bound = self._dtensors if self.pending_scale is None else self._scaled
        if len(places) == self.count and all(map(is_, map(self._read, self._params), bound)):
            return [True] * self.count
        live = []
        for i in places:
            grad = getattr(self._params[i], self._attribute, None)
            if grad is None:
                if self._flagged[i]:
                    self.flags[i].zero_()
                    self._flagged[i] = False
            elif grad is not self._dtensors[i] and grad is not self._scaled[i]:
                self._take_over(i, grad)
            live.append(grad is not None)
        return live

    def _take_over(self, index: int, grad: torch.Tensor) -> None:
        dtensor = self._dtensors[index]
        if (
            not isinstance(grad, DTensor)
            or grad.placements != dtensor.placements
            or grad.shape != dtensor.shape
        ):
            raise ForeignParameterError(
                "a gradient was replaced by a tensor that is not sharded like its parameter",
                expected=f"None, or a DTensor of shape {tuple(dtensor.shape)} with {dtensor.placements}",
                got=f"{type(grad).__name__} of shape {tuple(grad.shape)}",
                fix="assign None, or change the gradient in place",
            )
        self.apply_scale()  # a new gradient is not to be scaled with the others
        self.nonfinite = None
        with torch.no_grad():
            self._views[index].copy_(grad.to_local())
            self.flags[index].fill_(1)
        self._flagged[index] = True
        setattr(self._params[index], self._attribute, dtensor)

    # -- for graphs -------------------------------------------------------------------------------------

    def binding(self) -> Binding:
        """Returns what `rebind` takes."""
        gradients = tuple(map(self._read, self._params))
        return Binding(gradients, self.pending_scale, self.nonfinite, tuple(self._flagged))

    def rebind(self, binding: Binding) -> None:
        """Makes the host hold what it held when `binding` was made; device memory is not touched."""
        self.pending_scale, self.nonfinite = binding.pending_scale, binding.nonfinite
        self._flagged = list(binding.flagged)
        if not all(map(is_, map(self._read, self._params), binding.gradients)):
            for param, grad in zip(self._params, binding.gradients, strict=True):
                setattr(param, self._attribute, grad)

    def zero(self, places: Sequence[int]) -> None:
        """Zeroes the gradients at these places that are not None, as `zero_grad(set_to_none=False)` does.

        Zeros are finite, and what they were to be multiplied by is forgotten with the values: zero times NaN
        is not zero.
        """
        live = self.settle(range(self.count))
        chosen = [place for place in places if live[place]]
        if len(chosen) < sum(live):
            self.apply_scale()  # the others are still to be multiplied
        else:
            self.nonfinite = None
            if self.pending_scale is not None:
                self.pending_scale = None
                self._rebind(self._scaled, self._dtensors)
        for place in chosen:
            self._views[place].zero_()

    def scale_later(self, factor: torch.Tensor) -> None:
        """Multiplies all gradients by `factor`, later. See [Note: Pending scale] in `pending_scale.py`.

        Args:
            factor: float32 device scalar; kept, so it must not be changed afterwards.

        Streams: a second factor is multiplied with the first on the current stream.
        Capture: safe.
        """
        self.pending_scale = factor if self.pending_scale is None else self.pending_scale * factor
        self._rebind(self._dtensors, self._scaled)

    def apply_scale(self) -> None:
        """Multiplies the gradients by what is pending_scale, if anything is.

        Streams: in place, on the current stream, which must come after whoever wrote the gradients.
        Capture: safe.
        """
        pending_scale, self.pending_scale = self.pending_scale, None
        if pending_scale is not None:
            with torch.no_grad():
                self.values.mul_(pending_scale)
            self._rebind(self._scaled, self._dtensors)

    def _rebind(self, old: Sequence[DTensor], new: Sequence[DTensor]) -> None:
        for param, before, after in zip(self._params, old, new, strict=True):
            if getattr(param, self._attribute, None) is before:
                setattr(param, self._attribute, after)


class GradFacts:
    """What the host knows of the gradients of several shards, read at every replay, so without a loop.

    Args:
        shards: of one model.
    """

    def __init__(self, shards: Sequence[GradShard]) -> None:
        self._shards = list(shards)
        self._params: dict[str, list[nn.Parameter]] = {}
        for shard in self._shards:
            self._params.setdefault(shard._attribute, []).extend(shard._params)
        self._own = set[int]().union(*(shard._own for shard in self._shards))
        self._gradients: list[torch.Tensor | None] = []
        self._bound: tuple[int, ...] = ()

    def read(self) -> Hashable:
        """Returns what the host decides by: which gradients are bound, pending_scale, and known to be there.

        Somebody else's tensor is taken over first.
        """
        gradients = self._read_gradients()
        if len(gradients) != len(self._gradients) or not all(map(is_, gradients, self._gradients)):
            if not self._own.issuperset(map(id, gradients)):
                for shard in self._shards:
                    shard.settle(range(shard.count))
                gradients = self._read_gradients()
            self._gradients, self._bound = gradients, tuple(map(id, gradients))
        pending = tuple(map(is_not, self.pending(), repeat(None)))
        return self._bound, pending, tuple(chain.from_iterable(map(_FLAGGED, self._shards)))

    def pending(self) -> list[torch.Tensor | None]:
        """Returns `pending_scale` and `nonfinite` of each shard; `read` tells only whether they are there."""
        return list(chain.from_iterable(map(_PENDING, self._shards)))

    def _read_gradients(self) -> list[torch.Tensor | None]:
        read = (map(attrgetter(name), params) for name, params in self._params.items())
        return list(chain.from_iterable(read))
