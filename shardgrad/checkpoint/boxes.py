"""Boxes: where a piece of a tensor lies in the whole. Integers only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

__all__ = ["Box", "row_runs", "tile"]


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a tensor.

    Attributes:
        offset: its first element, in the whole tensor.
        shape: its size in each dimension.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box that is a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.shape)

    def meets(self, other: Box) -> Box | None:
        """Returns what both have, in the coordinates of the whole; None if that is nothing."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = tuple(map(min, self.ends(), other.ends()))
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(begins, shape) if all(size > 0 for size in shape) else None

    def ends(self) -> tuple[int, ...]:
        """Returns one past its last element, in each dimension."""
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))

    def seen_from(self, outer: Box) -> Box:
        """Returns the same box in the coordinates of another that contains it."""
        return Box(
            tuple(mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)), self.shape
        )

    def slices(self) -> tuple[slice, ...]:
        """Returns the index that cuts it out of the whole."""
        return tuple(slice(begin, end) for begin, end in zip(self.offset, self.ends(), strict=True))


def row_runs(box: Box, outer: Sequence[int], most: int) -> Iterator[tuple[Box, int, int]]:
    """Cuts a box into runs of whole rows of a tensor stored row by row.

    Args:
        box: in the coordinates of that tensor.
        outer: shape of the tensor.
        most: elements a run may span, unless a single row has more.

    Yields:
        The part of the box; the first element of the rows it is in, and one past their last.
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
    """Returns whether boxes cover a tensor once: in bands along the first dimension, each tiled in the next.

    What a mesh of any number of dimensions cuts is of this kind.
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
