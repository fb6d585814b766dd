"""Boxes: rectangular regions of a tensor, with integer arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["Box", "row_runs", "tile"]


@dataclass(frozen=True)
class Box:
    """A rectangular region of a tensor.

    Attributes:
        offset: index of the first element in the tensor.
        shape: size in each dimension.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box of an entire tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def meets(self, other: Box) -> Box | None:
        """Returns the intersection with another box of the same tensor; None if it is empty."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = tuple(map(min, self.ends(), other.ends()))
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, shape) if all(size > 0 for size in shape) else None

    def ends(self) -> tuple[int, ...]:
        """Returns the end index in each dimension, exclusive."""
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))

    def seen_from(self, outer: Box) -> Box:
        """Returns the box relative to another box that contains it."""
        return Box(
            tuple(mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)),
            self.shape,
        )

    def slices(self) -> tuple[slice, ...]:
        """Returns the index of the region in the tensor."""
        return tuple(slice(begin, end) for begin, end in zip(self.offset, self.ends(), strict=True))


def row_runs(box: Box, outer: Sequence[int], most: int) -> Iterator[tuple[Box, int, int]]:
    """Splits a box into parts that span runs of rows of a row-major tensor.

    Args:
        box: a box of the tensor.
        outer: shape of the tensor.
        most: number of elements that a run may span, unless a single row has more.

    Yields:
        A part of the box, and the first and the end element of the rows that it is in.
    """
    if not box.shape:
        yield box, 0, 1
        return
    row = math.prod(outer[1:])
    step = max(1, most // row)
    first, last = box.offset[0], box.offset[0] + box.shape[0]
    for begin in range(first, last, step):
        end = min(begin + step, last)
        part = Box((begin, *box.offset[1:]), (end - begin, *box.shape[1:]))
        yield part, begin * row, end * row


def tile(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Returns whether boxes cover a tensor exactly once.

    The boxes must be bands along the first dimension, each tiled in the next one, as shards over a
    mesh of any number of dimensions are. Other tilings return False.
    """
    return _tile([(box.offset, box.shape) for box in boxes], tuple(shape))


_Spans = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _tile(boxes: _Spans, shape: tuple[int, ...]) -> bool:
    if math.prod(shape) == 0:
        return not boxes
    if not shape:
        return len(boxes) == 1
    reached = 0
    band_of = sorted(boxes, key=lambda box: (box[0][0], box[1][0]))
    for (begin, size), band in groupby(band_of, key=lambda box: (box[0][0], box[1][0])):
        if begin != reached or size <= 0:
            return False
        if not _tile([(offset[1:], rest[1:]) for offset, rest in band], shape[1:]):
            return False
        reached = begin + size
    return reached == shape[0]
