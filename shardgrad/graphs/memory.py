"""The memory that tensors occupy: which tensors share memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from operator import mul

import torch

__all__ = ["Memory", "extent"]


class Memory:
    """The addresses that tensors occupy, including gaps between their elements."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []  # ascending too, since ranges that overlap are merged
        for begin, end in sorted(map(extent, tensors)):
            if self._ends and begin < self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            elif begin < end:
                self._begins.append(begin)
                self._ends.append(end)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor occupies any of the addresses."""
        begin, end = extent(tensor)
        last = bisect_left(self._begins, end) - 1  # the last range that begins before the end
        return begin < end and last >= 0 and begin < self._ends[last]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first element, and the one after its last element."""
    begin, strides = tensor.data_ptr(), tensor.stride()
    if not tensor.numel():
        return begin, begin
    last = sum(map(mul, tensor.shape, strides)) - sum(strides)
    return begin, begin + (last + 1) * tensor.itemsize
