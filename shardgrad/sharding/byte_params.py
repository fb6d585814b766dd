"""Parameters that travel as bytes: integers, booleans and float8, which have no gradients.

They are sharded, gathered and copied out as bytes, so a shard and what is sent have dtype uint8. A
parameter of shape (rows, ...) is stored as (rows, ..., bytes of an element), which `Shard(0)`
splits between elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["from_bytes", "is_float8", "stored_shape", "travels_as_bytes"]

_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_AS_BYTES = frozenset(getattr(torch, name) for name in (*_INTEGERS, *_FLOAT8))


def travels_as_bytes(dtype: torch.dtype) -> bool:
    """Returns whether parameters of a dtype travel as bytes and never get gradients."""
    return dtype in _AS_BYTES


def is_float8(dtype: torch.dtype) -> bool:
    """Returns whether a dtype travels as bytes and is of floating point."""
    return travels_as_bytes(dtype) and dtype.is_floating_point


def stored_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the shape in which a parameter lies in memory: with its elements' bytes if it travels
    as bytes.
    """
    return (*shape, dtype.itemsize) if travels_as_bytes(dtype) else tuple(shape)


def from_bytes(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a parameter over the memory that it is stored in; `stored` itself if it does not
    travel as bytes.
    """
    return stored.view(dtype).squeeze(-1) if travels_as_bytes(dtype) else stored
