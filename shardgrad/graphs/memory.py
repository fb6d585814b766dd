"""The memory that tensors occupy: which tensors share memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from operator import mul

import torch

__all__ = ["Memory", "extent"]


class Memory:
    """The addresses that tensors occupy, including gaps between their elements."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        extents = sorted(map(extent, filter(torch.Tensor.numel, tensors)))
        self._begins = [begin for begin, _ in extents]
        # The end of a range, or of one that begins before it and reaches further.
        self._ends = list(accumulate((end for _, end in extents), max))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor occupies any of the addresses."""
        begin, end = extent(tensor)
        last = bisect_left(self._begins, end) - 1  # the last range that begins before the end
        return begin < end and last >= 0 and begin < self._ends[last]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first element, and the one after its last element."""
    begin, strides = tensor.data_ptr(), tensor.stride()
    last = sum(map(mul, tensor.shape, strides)) - sum(strides)
    return begin, begin + bool(tensor.numel()) * (last + 1) * tensor.itemsize
