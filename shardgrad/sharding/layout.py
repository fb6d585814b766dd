"""The memory layout of a group: computes offsets from shapes and a world size.

The parameters of a group are packed so that each rank has one contiguous *chunk*, and a parameter's
piece has the same offset in every rank's chunk. With three parameters on two ranks:

      chunk of rank 0:  | A rows 0..a | pad | B rows 0..b | pad | C ... | pad | tail |
      chunk of rank 1:  | A rows a..  | pad | B rows b..  | pad | C ... | pad | tail |

Pieces follow `torch.chunk` along dim 0, so a piece *is* the local tensor of a `Shard(0)` DTensor.
Trailing ranks may have short or empty pieces. A parameter may be sharded evenly on another dim
instead. Its piece is contiguous in the chunk, but is no longer one range of the parameter, and
`strided_pack.py` copies it. Every piece starts on a multiple of `alignment` elements, so that every
pointer passed to a collective or a kernel is aligned (otherwise NCCL leaves its fast path,
nccl#413).

The *tail* has room for one element per parameter, in chunks of gradients ([Note: Touched flags] in
`engine/grad_group.py`), and ends with room for the message's tag ([Note: Message tags] in
`engine/transports.py`).

Parameters that are sent as separate messages ([Note: Zero-copy parameters] in `zero_copy.py`) come
first in a chunk. The rest, which is packed into one message, is then the end of the chunk, and has
a layout of its own.

The flat unsharded buffer has the unsharded parameters side by side, with the same alignment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

ALIGNMENT_NBYTES = 128

# Elements at the end of each chunk for the message's tag ([Note: Message tags] in
# `engine/transports.py`).
TAG_NUMEL = 3


def alignment_numel(dtypes: Sequence[torch.dtype]) -> int:
    """Returns the number of elements whose size is a multiple of 128 bytes in each of `dtypes`."""
    return ALIGNMENT_NBYTES // min(dtype.itemsize for dtype in dtypes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Piece:
    """One parameter's position; offsets and counts in elements.

    Attributes:
        shape: global.
        shard_rows: rows of the sharded dim in a full piece, `ceil(shape[dim] / world_size)`.
        shard_numel: elements of a full piece.
        span: elements reserved in a chunk, `shard_numel` rounded up.
        shard_offset: first element in a chunk.
        unsharded_offset: first element in the flat unsharded buffer.
        dim: the sharded dim.
    """

    shape: tuple[int, ...]
    shard_rows: int
    shard_numel: int
    span: int
    shard_offset: int
    unsharded_offset: int
    dim: int

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """Number of ranges of the parameter in one piece; 1 if its outermost dim is sharded."""
        return math.prod(self.shape[: self.dim])

    def rows(self, rank: int) -> tuple[int, int]:
        """Returns the half-open range of `dim` on `rank`, as `torch.chunk` splits it."""
        begin = min(rank * self.shard_rows, self.shape[self.dim])
        return begin, min(begin + self.shard_rows, self.shape[self.dim])

    def of(self, unsharded: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns the part of an unsharded parameter on `rank`: a view, with gaps if strided."""
        begin, end = self.rows(rank)
        return unsharded.narrow(self.dim, begin, end - begin)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of the piece on `rank`; `dim` may be empty."""
        begin, end = self.rows(rank)
        return (*self.shape[: self.dim], end - begin, *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        """Returns the elements of the piece on `rank`, at most `shard_numel`."""
        return math.prod(self.local_shape(rank))


@dataclass(frozen=True)
class ShardLayout:
    """The pieces of one group over `world_size` ranks. Create it with `ShardLayout.of`.

    Attributes:
        world_size: number of ranks, each with a chunk.
        alignment: elements.
        pieces: of all parameters, in the given order.
        tail_offset: elements before the tail.
        chunk_numel: elements of one rank's chunk, including the tail.
        unsharded_numel: elements of the flat unsharded buffer.
        zero_copy: indices of the parameters that are sent as separate messages; their pieces come
            first in a chunk.
    """

    world_size: int
    alignment: int
    pieces: tuple[Piece, ...]
    tail_offset: int
    chunk_numel: int
    unsharded_numel: int
    zero_copy: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        world_size: int,
        *,
        alignment: int,
        with_flags: bool,
        dims: Sequence[int] | None = None,
        zero_copy: Sequence[bool] = (),
    ) -> ShardLayout:
        """Lays out parameters, zero-copy ones first, otherwise in the given order.

        Args:
            shapes: global shapes, each with at least one dimension.
            world_size: ranks the group is sharded over.
            alignment: elements; see `alignment_numel`.
            with_flags: reserve one element per parameter after the pieces.
            dims: the sharded dim of each; None for dim 0. A dim other than 0 has to divide evenly.
            zero_copy: per parameter, whether it is sent as a separate message; () if none is.
        """
        pieces: list[Piece] = []
        unsharded_numel = 0
        for given, dim in zip(shapes, dims or [0] * len(shapes), strict=True):
            shape = tuple(given)
            shard_rows = -(-shape[dim] // world_size)
            shard_numel = shard_rows * math.prod(shape[:dim] + shape[dim + 1 :])
            span = _round_up(shard_numel, alignment)
            pieces.append(Piece(shape, shard_rows, shard_numel, span, 0, unsharded_numel, dim))
            unsharded_numel += _round_up(math.prod(shape), alignment)
        first = tuple(i for i, travels_alone in enumerate(zero_copy) if travels_alone)
        tail_offset = 0
        for i in dict.fromkeys((*first, *range(len(pieces)))):
            pieces[i] = replace(pieces[i], shard_offset=tail_offset)
            tail_offset += pieces[i].span
        tail_numel = _round_up((len(pieces) if with_flags else 0) + TAG_NUMEL, alignment)
        return cls(
            world_size,
            alignment,
            tuple(pieces),
            tail_offset,
            chunk_numel=tail_offset + tail_numel,
            unsharded_numel=unsharded_numel,
            zero_copy=first,
        )

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Indices of the parameters that are not zero-copy."""
        return tuple(sorted({*range(len(self.pieces))}.difference(self.zero_copy)))

    @cached_property
    def packed_offset(self) -> int:
        """Elements of a chunk before the first parameter that is not zero-copy."""
        return sum(self.pieces[i].span for i in self.zero_copy)

    @cached_property
    def packed(self) -> ShardLayout:
        """The layout of the other parameters and the tail, in chunks without `packed_offset`."""
        if not self.zero_copy:
            return self
        skipped = self.packed_offset
        rest = (self.pieces[i] for i in self.others)
        return replace(
            self,
            pieces=tuple(
                replace(piece, shard_offset=piece.shard_offset - skipped) for piece in rest
            ),
            tail_offset=self.tail_offset - skipped,
            chunk_numel=self.chunk_numel - skipped,
            zero_copy=(),
        )

    @cached_property
    def whole(self) -> ShardLayout:
        """The layout of the unsharded parameters, side by side."""
        return ShardLayout.of(
            [piece.shape for piece in self.pieces], 1, alignment=self.alignment, with_flags=False
        )

    @cached_property
    def strided(self) -> tuple[int, ...]:
        """Indices of the parameters whose pieces consist of several ranges; see
        `strided_pack.py`.
        """
        # A single rank has all of each parameter, which is one range.
        return tuple(i for i, p in enumerate(self.pieces) if p.blocks > 1 < self.world_size)

    @cached_property
    def table(self) -> torch.Tensor:
        """int64 CPU tensor [parameters that are not strided, 5] that pack and unpack kernels read
        (`ops/movement.py`).
        """
        rows = [
            [p.numel, p.shard_numel, p.span, p.shard_offset, p.unsharded_offset]
            for i, p in enumerate(self.pieces)
            if i not in self.strided
        ]
        return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 5)

    @cached_property
    def table_with_tail(self) -> torch.Tensor:
        """`table` with a row for the tail, packed like a parameter with `tail_numel` rows
        per rank.
        """
        tail = [
            self.tail_numel * self.world_size,
            self.tail_numel,
            self.tail_numel,
            self.tail_offset,
            0,
        ]
        return torch.cat([self.table, torch.tensor([tail], dtype=torch.int64, device="cpu")])

    @property
    def tail_numel(self) -> int:
        """Elements of the tail; the last `TAG_NUMEL` are for a tag."""
        return self.chunk_numel - self.tail_offset

    def local_views(self, chunk: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Splits a chunk (1-D, `chunk_numel`) into views: the local tensors of `rank`, in order."""
        return [
            chunk.narrow(0, p.shard_offset, p.local_numel(rank)).view(p.local_shape(rank))
            for p in self.pieces
        ]
