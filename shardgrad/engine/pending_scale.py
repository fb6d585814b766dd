"""A gradient that is to be multiplied by a factor, which happens when a program looks at it.

[Note: Pending scale]
Clipping and loss scaling multiply every gradient by one number. Writing that product costs a pass over
memory that the optimizer's kernel can do for nothing, so a gradient shard may have a *pending scale*: the
bytes stay, a device scalar is remembered, and kernels that read the shard multiply by it. `param.grad` is
then a `ScaledGradient`: shape, dtype, placements and identity can be looked at for nothing, and the first
operation that reads or writes its values makes the shard apply the scale, by one multiplication in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

__all__ = ["ScaledGradient"]


class ScaledGradient(DTensor):
    """Stands where a parameter's gradient is while its shard has a pending scale. See [Note: Pending scale].

    Args:
        dtensor: the gradient itself.
        apply_scale: multiplies the shard by its pending scale, once, and puts `dtensor` back in this place.
    """

    _dtensor: DTensor
    _apply_scale: Callable[[], None]

    def __new__(cls, dtensor: DTensor, apply_scale: Callable[[], None]) -> ScaledGradient:
        """Makes a DTensor over the same memory."""
        self: ScaledGradient
        self = super().__new__(cls, dtensor._local_tensor, dtensor._spec, requires_grad=False)  # type: ignore[assignment]
        self._dtensor = dtensor
        self._apply_scale = apply_scale
        return self

    def __init__(self, dtensor: DTensor, apply_scale: Callable[[], None]) -> None:
        pass

    def scaled(self) -> DTensor:
        """Returns the gradient with the factor in it.

        Streams: the multiplication, if one is due, runs on the current stream.
        """
        self._apply_scale()
        return self._dtensor

    def unscaled(self) -> torch.Tensor:
        """Returns the local tensor as it is, without the factor."""
        return self._dtensor._local_tensor

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
        # DTensor's constructor assigns it; the dtensor has it already.
        pass

    def __deepcopy__(self, memo: Any) -> Any:
        return self.scaled().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.scaled().__reduce_ex__(protocol)
