"""A gradient that owes a factor, and pays it when somebody looks.

[Note: Owed factor]
Clipping and loss scaling multiply every gradient by one number. Writing that product costs a pass over
memory that the optimizer's kernel can do for nothing, so a gradient shard may *owe* a factor: the bytes stay,
a device scalar is remembered, and kernels that read the shard multiply by it. `param.grad` is then an
`ScaledGradient`: shape, dtype, placements and identity can be looked at for nothing, and the first operation
that reads or writes its values makes the shard pay, with one multiplication in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

__all__ = ["ScaledGradient"]


class ScaledGradient(DTensor):
    """Stands where a parameter's gradient is while its shard owes a factor. See [Note: Owed factor].

    Args:
        face: the gradient itself.
        pay: multiplies the shard by what it owes, once, and puts `face` back where this object stands.
    """

    _face: DTensor
    _pay: Callable[[], None]

    def __new__(cls, face: DTensor, pay: Callable[[], None]) -> ScaledGradient:
        """Makes a DTensor over the same memory."""
        self: ScaledGradient
        self = super().__new__(cls, face._local_tensor, face._spec, requires_grad=False)  # type: ignore[assignment]
        self._face = face
        self._pay = pay
        return self

    def __init__(self, face: DTensor, pay: Callable[[], None]) -> None:
        pass

    def paid(self) -> DTensor:
        """Returns the gradient with the factor in it.

        Streams: the multiplication, if one is due, runs on the current stream.
        """
        self._pay()
        return self._face

    def unpaid(self) -> torch.Tensor:
        """Returns the local tensor as it is, without the factor."""
        return self._face._local_tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(ScaledGradient, ScaledGradient.paid, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.paid()._local_tensor

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        # DTensor's constructor assigns it; the face has it already.
        pass

    def __deepcopy__(self, memo: Any) -> Any:
        return self.paid().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.paid().__reduce_ex__(protocol)
