"""A gradient with a pending scale, which is applied as soon as the values are used.

[Note: Pending scale]
Clipping and loss scaling multiply every gradient by one number. Writing that product costs a pass
over memory that the optimizer's kernel can do for nothing, so a gradient shard may have a *pending
scale*: the bytes stay, a device scalar is remembered, and kernels that read the shard multiply by
it. `param.grad` is then a `ScaledGradient`: shape, dtype, placements and identity can be looked at
for nothing, and the first operation that reads or writes its values applies the scale, with one
multiplication in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

__all__ = ["ScaledGradient"]


class ScaledGradient(DTensor):
    """Stands where a parameter's gradient is while its shard has a pending scale. See [Note:
    Pending scale].

    Args:
        grad: the gradient itself.
        apply_scale: multiplies the shard by its pending scale, once, and puts `grad` back where
            this object stands.
    """

    _gradient: DTensor
    _apply_scale: Callable[[], None]

    def __new__(cls, grad: DTensor, apply_scale: Callable[[], None]) -> ScaledGradient:
        """Makes a DTensor over the same memory."""
        self: ScaledGradient
        self = super().__new__(cls, grad._local_tensor, grad._spec, requires_grad=False)  # type: ignore[assignment]
        self._gradient = grad
        self._apply_scale = apply_scale
        return self

    def __init__(self, grad: DTensor, apply_scale: Callable[[], None]) -> None:
        pass

    def scaled(self) -> DTensor:
        """Returns the gradient with the factor in it.

        Streams: the multiplication, if one is due, runs on the current stream.
        """
        self._apply_scale()
        return self._gradient

    def unscaled(self) -> torch.Tensor:
        """Returns the local tensor as it is, without the factor."""
        return self._gradient._local_tensor

    def part(self) -> None:
        """Forgets the shard, which goes on without this object; it has no pending scale."""
        self._apply_scale = _nothing

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(ScaledGradient, ScaledGradient.scaled, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.scaled()._local_tensor

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        # DTensor's constructor assigns it; the grad has it already.
        pass

    def __deepcopy__(self, memo: Any) -> Any:
        return self.scaled().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.scaled().__reduce_ex__(protocol)


def _nothing() -> None:
    pass
