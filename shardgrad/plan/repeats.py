"""A cache of operators' results and work, by the shapes of their operands.

Every block of a model runs the same operators, and computing their results' shapes would take most
of the time of a rehearsal. The result of an operator on fake tensors depends on shapes, strides,
dtypes and numbers, not on values in memory, so it is computed once for each combination.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

__all__ = ["Seen", "Work", "key_of"]

_PLAIN = (
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_NUMBERS = (int, float)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an operator on the device; attributes as of `Kernel`."""

    flops: float
    palm_flops: float
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class _New:
    """A result with a new storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Operand:
    """A result that is an operand, by its index."""

    index: int


def key_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Returns what the result of a call depends on; None if that is more than shapes and
    numbers.
    """
    if torch.Tag.inplace_view in func.tags:
        return None
    key: list[Hashable] = [func, torch.get_default_dtype()]
    if not func._schema.returns:  # then no number, of which a seed is one, decides on a shape
        args = [arg for arg in args if type(arg) not in _NUMBERS]
        kwargs = {name: arg for name, arg in kwargs.items() if type(arg) not in _NUMBERS}
    if not _describe(args, key) or (kwargs and not _describe([*kwargs, *kwargs.values()], key)):
        return None
    return tuple(key)


def _describe(values: Sequence[Any], key: list[Hashable]) -> bool:
    """Appends the properties of values to a key; returns False if a value has an unknown type."""
    key.append(len(values))
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return False
            device = value.device
            if isinstance(value, FakeTensor):
                if value.constant is not None:
                    return False
                device = value.fake_device
            key += (value.shape, value.stride(), value.dtype, device, isinstance(value, FakeTensor))
        elif isinstance(value, list | tuple):
            # The chunks of 16,384 ranks are one tensor as many times; see `_one_piece_for_many`.
            runs = [list(run) for _, run in groupby(value, id)]
            key.append(tuple(map(len, runs)))
            if not _describe([run[0] for run in runs], key):
                return False
        elif isinstance(value, _PLAIN):
            key.append((type(value), value))  # 1, 1.0 and True are equal
        else:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Seen:
    """A cached call.

    Attributes:
        pattern: the result, with a `_New` or an `_Operand` instead of every tensor.
        work: work on the device; None if there is none.
    """

    pattern: Any
    work: Work | None

    @classmethod
    def of(cls, result: Any, operands: Sequence[torch.Tensor], work: Work | None) -> Seen | None:
        """Returns a cache entry, or None if the result is a view of a part of an operand.

        Args:
            result: result of the call.
            operands: tensors among its arguments, in order.
            work: work on the device.
        """
        try:
            return cls(_pattern_of(result, operands), work)
        except _UnrepeatableError:
            return None

    def again(self, mode: FakeTensorMode, operands: Sequence[torch.Tensor]) -> Any:
        """Returns the result of the same call on other operands."""
        return _made(self.pattern, mode, operands)


class _UnrepeatableError(Exception):
    """The result of a call cannot be described by a pattern."""


def _pattern_of(result: Any, operands: Sequence[torch.Tensor]) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_pattern_of(each, operands) for each in result)
    if result is None or isinstance(result, int):
        return result
    for index, operand in enumerate(operands):
        if result is operand:
            return _Operand(index)
    # A new storage has exactly the size of the tensor.
    if (
        isinstance(result, FakeTensor)
        and result.constant is None
        and result.layout is torch.strided
    ):
        span = sum(
            (size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True)
        )
        nbytes = (span + 1) * result.itemsize if result.numel() else 0
        storage = result.untyped_storage()
        shared = any(storage._cdata == operand.untyped_storage()._cdata for operand in operands)
        if not shared and result.storage_offset() == 0 and storage.nbytes() == nbytes:
            return _New(result.shape, result.stride(), result.dtype, result.fake_device)
    raise _UnrepeatableError


def _made(pattern: Any, mode: FakeTensorMode, operands: Sequence[torch.Tensor]) -> Any:
    if isinstance(pattern, _New):
        with in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(
                pattern.shape, pattern.stride, dtype=pattern.dtype, device="meta"
            )
        return FakeTensor(mode, empty, pattern.device)
    if isinstance(pattern, _Operand):
        return operands[pattern.index]
    if isinstance(pattern, list | tuple):
        return type(pattern)(_made(each, mode, operands) for each in pattern)
    return pattern
