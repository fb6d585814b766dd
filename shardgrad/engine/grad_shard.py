"""The gradient shard: one persistent flat buffer per group whose views are the parameters' gradients.

[Note: Gradient binding]
Each parameter's gradient is one DTensor, made once, over one address, for the life of the model. `None`
keeps its meaning: a parameter whose gradient is None when a reduction lands is overwritten, any other is
added to; nothing is allocated in either case. A gradient that is another tensor (assigned by hand,
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

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.engine.streams import StreamEvent, Streams, is_capturing
from shardgrad.errors import ForeignParameterError
from shardgrad.policies import GradientPolicy
from shardgrad.sharding.dtensor import dtensor_like, in_own_storage
from shardgrad.sharding.layout import Piece, ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.offload import ShardMemory
from shardgrad.sharding.scaled_gradient import ScaledGradient

__all__ = ["GradShard", "HostState"]

# Per parameter, the gradient that is bound; `pending_scale`; `nonfinite`; per parameter, what the flag says.
HostState = tuple[tuple[torch.Tensor | None, ...], torch.Tensor | None, torch.Tensor | None, tuple[bool, ...]]


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
            See [Note: Pending scale] in `sharding/scaled_gradient.py`.
        params, attribute: the parameters, and the name of what their gradients are bound to.
        flagged: per parameter, what its flag says, as far as the host has made sure of it.
        own_ids: `id` of everything that may be bound to a parameter without being taken over.
        touched: per parameter, whether this rank had a gradient in the last reduction; empty before it.
        nonfinite: device scalar (float32), above zero if a norm or a loss scaler found an infinity or a NaN
            in the gradients it looked at, these among them; None if none has looked.
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
        self.params = list(params)
        self._layout = layout
        self.attribute = policy.attribute
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
        self._grads = [
            dtensor_like(in_own_storage(view), cast(DTensor, param))
            for param, view in zip(self.params, self._views, strict=True)
        ]
        self._scaled = [ScaledGradient(grad, self.apply_scale) for grad in self._grads]
        self._index = {id(param): i for i, param in enumerate(self.params)}
        self.flagged = [False] * len(self.params)
        self._seen: dict[tuple[bool, ...], list[bool]] = {}
        self.own_ids = {id(None), *map(id, self._grads), *map(id, self._scaled)}
        for param in self.params:
            if policy.decoupled:
                setattr(param, self.attribute, getattr(param, self.attribute, None))
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
        if not any(map(is_not, map(self._read, self.params), repeat(None))):
            self.pending_scale = None
            return False
        self.apply_scale()
        for i, live in enumerate(self.settle(range(len(self.params)))):
            if not live:
                self._views[i].zero_()
        return True

    def reduce_into(
        self,
        write: Callable[..., None],
        divisor: float,
        staging: torch.Tensor | None,
        streams: Streams,
    ) -> None:
        """Writes a reduction's average, or adds it where there are gradients already.

        Args:
            write: see `PendingSum.write`.
            divisor: what the sum is divided by.
            staging: memory like `flat` on the mesh's device, if `needs_staging`.
            streams: of the root.

        Streams: on the current one.
        """
        accumulate = self.prepare()
        if staging is None:
            write(self.flat, divisor=divisor, accumulate=accumulate)
            return
        if accumulate:
            staging.copy_(self.flat, non_blocking=True)
        write(staging, divisor=divisor, accumulate=accumulate)
        # To the host, where the shard lives; the copy goes on after the return, until `wait_on_host`.
        self.flat.copy_(staging, non_blocking=self._home.pinned)
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
        self.flagged = list(anywhere)
        self.touched = tuple(touched)
        for param, own, live in zip(self.params, self._grads, anywhere, strict=True):
            if not live:
                continue
            if getattr(param, self.attribute, None) is not own:
                setattr(param, self.attribute, own)
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
        for param in self.params:
            setattr(param, self.attribute, None)

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

    def grad(self, place: int) -> DTensor:
        """Returns a parameter's gradient, bound or not."""
        return self._grads[place]

    @property
    def count(self) -> int:
        """Number of parameters with a place."""
        return len(self.params)

    def settle(self, places: Sequence[int]) -> list[bool]:
        """Makes flags and values agree with what the program has bound to the parameters.

        The flag of a gradient that is None now is cleared; any other tensor is copied into the shard.

        Returns:
            Per place, whether the parameter has a gradient.

        Streams: writes, if any, go to the current stream.
        Capture: safe; what is bound is a fact of the host and fixed by the capture.

        Raises:
            ForeignParameterError: a gradient is not sharded like its parameter.
        """
        # In a steady step every gradient is bound as it was: one pass in C over however many there are.
        bound = self._grads if self.pending_scale is None else self._scaled
        if len(places) == self.count and all(map(is_, map(self._read, self.params), bound)):
            return [True] * self.count
        live = []
        for i in places:
            grad = getattr(self.params[i], self.attribute, None)
            if grad is None:
                if self.flagged[i]:
                    self.flags[i].zero_()
                    self.flagged[i] = False
            elif grad is not self._grads[i] and grad is not self._scaled[i]:
                self._take_over(i, grad)
            live.append(grad is not None)
        return live

    def _take_over(self, index: int, grad: torch.Tensor) -> None:
        own = self._grads[index]
        if not isinstance(grad, DTensor) or grad.placements != own.placements or grad.shape != own.shape:
            raise ForeignParameterError(
                "a gradient was replaced by a tensor that is not sharded like its parameter",
                expected=f"None, or a DTensor of shape {tuple(own.shape)} with {own.placements}",
                got=f"{type(grad).__name__} of shape {tuple(grad.shape)}",
                fix="assign None, or change the gradient in place",
            )
        self.apply_scale()  # a new gradient does not share the pending scale of the others
        self.nonfinite = None
        with torch.no_grad():
            self._views[index].copy_(grad.to_local())
            self.flags[index].fill_(1)
        self.flagged[index] = True
        setattr(self.params[index], self.attribute, own)

    # -- for graphs -------------------------------------------------------------------------------------

    def host_state(self) -> HostState:
        """Returns what the host knows of the gradients; their values are in device memory."""
        gradients = tuple(map(self._read, self.params))
        return gradients, self.pending_scale, self.nonfinite, tuple(self.flagged)

    def restore(self, state: HostState) -> None:
        """Makes the host know what it knew when `state` was read; device memory is not touched."""
        gradients, self.pending_scale, self.nonfinite, flagged = state
        self.flagged = list(flagged)
        if not all(map(is_, map(self._read, self.params), gradients)):
            for param, grad in zip(self.params, gradients, strict=True):
                setattr(param, self.attribute, grad)

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
                self._rebind(self._scaled, self._grads)
        for place in chosen:
            self._views[place].zero_()

    def scale_later(self, factor: torch.Tensor) -> None:
        """Multiplies all gradients by `factor`, when they are next used; see `pending_scale`.

        Args:
            factor: float32 device scalar; kept, so it must not be changed afterwards.

        Streams: a second factor is multiplied with the first on the current stream.
        Capture: safe.
        """
        self.pending_scale = factor if self.pending_scale is None else self.pending_scale * factor
        self._rebind(self._grads, self._scaled)

    def apply_scale(self) -> None:
        """Multiplies the gradients by the pending scale, if there is one.

        Streams: in place, on the current stream, which must come after the one that wrote them.
        Capture: safe.
        """
        scale, self.pending_scale = self.pending_scale, None
        if scale is not None:
            with torch.no_grad():
                self.values.mul_(scale)
            self._rebind(self._scaled, self._grads)

    def _rebind(self, old: Sequence[DTensor], new: Sequence[DTensor]) -> None:
        for param, before, after in zip(self.params, old, new, strict=True):
            if getattr(param, self.attribute, None) is before:
                setattr(param, self.attribute, after)
