"""The gradient shard: one persistent flat buffer per group whose views are the parameters' gradients.

[Note: Gradient binding]
Each parameter's gradient is one DTensor, made once, over one address, for the life of the model. `None`
keeps its meaning: a parameter whose gradient is None when a reduction lands is overwritten, any other is
added to; nothing is allocated in either case. A gradient that is somebody else's tensor (assigned by hand,
or accumulated by autograd through a DTensor operation) is copied into the shard and the binding restored.
A parameter that got no gradient on any rank stays None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .errors import ForeignParameterError
from .layout import ShardLayout
from .mesh import DataParallelMesh
from .policies import GradientPolicy

__all__ = ["GradientShard"]


class GradientShard:
    """Persistent gradients of one group on one rank.

    Args:
        params: the group's trainable sharded parameters, in layout order.
        layout: their places, with a tail.
        mesh: gives device, rank and placements.
        dtype: of the shard.
        policy: where gradients are bound.

    Attributes:
        flat: 1-D, `layout.chunk_numel` elements of `dtype` on the mesh's device.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: ShardLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        policy: GradientPolicy,
    ) -> None:
        self._params = list(params)
        self._layout = layout
        self._attribute = policy.attribute
        self.flat = torch.zeros(layout.chunk_numel, dtype=dtype, device=mesh.device)
        self._views = layout.local_views(self.flat, mesh.shard_rank)
        self._flags = self.flat.narrow(0, layout.tail_offset, len(layout.pieces))
        self._faces = [
            DTensor.from_local(
                view, mesh.mesh, mesh.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
            for param, view in zip(self._params, self._views, strict=True)
        ]
        if not policy.decoupled:
            for param in self._params:
                if param.dtype != dtype:
                    param.grad_dtype = dtype

    def prepare(self) -> bool:
        """Makes the shard ready to be written by a reduction.

        Returns:
            False if the reduction should overwrite everything (every gradient is None), else True: it should
            add. Gradients that are None are then zeroed, and foreign ones taken over, first.

        Streams: writes, if any, go to the current stream.
        """
        kept = [getattr(param, self._attribute, None) for param in self._params]
        if not any(grad is not None for grad in kept):
            return False
        for i, grad in enumerate(kept):
            if grad is None:
                self._views[i].zero_()
                self._flags[i].zero_()
            elif grad is not self._faces[i]:
                self._take_over(i, grad)
        return True

    def _take_over(self, index: int, grad: torch.Tensor) -> None:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        face = self._faces[index]
        if not isinstance(grad, DTensor) or grad.placements != face.placements or grad.shape != face.shape:
            raise ForeignParameterError(
                "a gradient was replaced by a tensor that is not sharded like its parameter",
                expected=f"None, or a DTensor of shape {tuple(face.shape)} with {face.placements}",
                got=f"{type(grad).__name__} of shape {tuple(grad.shape)}",
                fix="assign None, or change the gradient in place",
            )
        with torch.no_grad():
            self._views[index].copy_(local)
            self._flags[index].fill_(1)
        setattr(self._params[index], self._attribute, face)

    def bind(self, touched: Sequence[bool]) -> None:
        """Binds the gradient of every parameter that was touched on some rank, and runs its hooks.

        Args:
            touched: per parameter, whether it got a gradient on this rank. Where it did not, the reduced
                flags tell whether another rank had one; only then is the shard read by the host.
        """
        anywhere = list(touched)
        if not all(anywhere):
            flags = self._flags.tolist()
            anywhere = [here or flag > 0 for here, flag in zip(touched, flags, strict=True)]
        for param, face, live in zip(self._params, self._faces, anywhere, strict=True):
            if not live:
                continue
            if getattr(param, self._attribute, None) is not face:
                setattr(param, self._attribute, face)
            # torch keeps these hooks for autograd's own accumulation, which the sharded parameter never
            # sees; FSDP2 runs them after its reduction too.
            hooks = param._post_accumulate_grad_hooks
            if hooks:
                for hook in list(hooks.values()):
                    hook(param)

    def unbind(self) -> None:
        """Forgets the gradients: each parameter's becomes None."""
        for param in self._params:
            setattr(param, self._attribute, None)
