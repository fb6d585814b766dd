"""Which rank orthogonalises which matrix, and the layout of the buffers they are exchanged in;
integers only.

[Note: Owned matrices]
Newton-Schulz needs an unsharded matrix. So every matrix has one *owner* in its shard group. A
matrix that one rank has all of, as an expert's or an attention head's may be, is that rank's. Of
others the owner receives the pieces of all ranks, orthogonalises the matrix and sends the results
back: two exchanges, each an all-to-all. A rank never holds a matrix that it does not own.

Matrices are exchanged in *buckets*: consecutive segments that together have equal work for every
rank. A unit with seven matrices on 64 ranks would leave 57 of them idle, and one bucket for the
model would need staging for the model.

      send buffer, rank 0:    | pieces of matrices of rank 0 | pieces of matrices of rank 1 | ...
      receive buffer, rank 0: | pieces from rank 0 | pieces from rank 1 | ...
      matrices, rank 0:       | matrices of one shape | matrices of another shape | ...

Pieces are sorted by the shape of their matrix. So where nothing travels, the buffer that would be
sent is the one of the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

from shardgrad.sharding.layout import ShardLayout

__all__ = ["Batch", "BufferSlice", "Exchange", "Matrix", "ReceivedPiece", "buckets", "owners"]

# The pieces of matrices of one shape start on a multiple of so many elements: 128 bytes in
# bfloat16, for the reason given in layout.py.
_ALIGNMENT_NUMEL = 64

# A bucket ends as soon as no rank has more than this share of the mean work above it.
_UNEVENNESS = 0.05

# Nor before it has so many elements for each rank: a smaller one is launched for longer than it
# computes.
_LEAST_NUMEL = 1 << 26


class Matrix(NamedTuple):
    """One matrix of a parameter, and who has which of its rows.

    Attributes:
        shape: rows and columns.
        begin: its first row among all rows of the parameter.
        parts: half-open range of the parameter's rows that each rank has.
    """

    shape: tuple[int, int]
    begin: int
    parts: tuple[tuple[int, int], ...]

    @classmethod
    def all_of(cls, shape: Sequence[int], num_heads: int, world_size: int) -> list[Matrix]:
        """Returns the matrices of a parameter, in memory order.

        Args:
            shape: of the parameter, two dims or a stack of matrices; sharded along dim 0.
            num_heads: matrices that the rows of each are divided into.
            world_size: ranks of the shard group.
        """
        piece = ShardLayout.of([shape], world_size, alignment=1, with_flags=False).pieces[0]
        rows_in_row = prod(shape[1:-1])
        bounds = (piece.rows(rank) for rank in range(world_size))
        parts = tuple((begin * rows_in_row, end * rows_in_row) for begin, end in bounds)
        rows = shape[-2] // num_heads
        count = prod(shape[:-2]) * num_heads
        return [cls((rows, shape[-1]), i * rows, parts) for i in range(count)]

    @property
    def work(self) -> int:
        """Multiplications of one Newton-Schulz step, at least 1.

        With s the shorter side and l the longer: `s^2 l` for the Gram matrix, `s^3` for its square,
        `s^2 l` for the product with the matrix.
        """
        short, long = sorted(self.shape)
        return max(1, short * short * (2 * long + short))

    @property
    def home(self) -> int | None:
        """The rank that has all of it, if there is one."""
        end = self.begin + self.shape[0]
        whole = (r for r, (low, high) in enumerate(self.parts) if low <= self.begin and end <= high)
        return next(whole, None)

    def rows(self, rank: int) -> tuple[int, int]:
        """Returns the half-open range of its own rows that a rank has."""
        low, high = (min(max(row - self.begin, 0), self.shape[0]) for row in self.parts[rank])
        return low, high

    def local_numel(self, rank: int) -> int:
        """Returns the elements that a rank has."""
        begin, end = self.rows(rank)
        return (end - begin) * self.shape[1]


def owners(matrices: Sequence[Matrix], world_size: int) -> tuple[list[int], list[int]]:
    """Chooses an owner for each matrix, so that ranks have about equal work.

    What is whole on a rank stays there. Of the others the heaviest that is left goes to the rank
    with the least work; ties go to the lower index, so all ranks choose alike. No rank gets more
    than the mean and one matrix, unless what it has is more.

    Args:
        matrices: in an order that all ranks share.
        world_size: ranks of the shard group.

    Returns:
        One rank for each matrix, and the work of each rank.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    chosen, load = [0] * len(matrices), [0] * world_size
    homes = [matrix.home for matrix in matrices]
    for i in sorted(range(len(homes)), key=lambda i: (homes[i] is None, -matrices[i].work, i)):
        home = homes[i]
        rank = load.index(min(load)) if home is None else home
        chosen[i] = rank
        load[rank] += matrices[i].work
    return chosen, load


def buckets(segments: Sequence[Sequence[Matrix]], world_size: int) -> list[range]:
    """Divides segments, in order, into buckets.

    Args:
        segments: the matrices of each.
        world_size: ranks of the shard group.

    Returns:
        Ranges of indices that cover all segments. In each no rank has more than `_UNEVENNESS` above
        the mean work, and the mean rank has `_LEAST_NUMEL` elements; without its last segment one
        of both would not be so. What is left over joins the last one.
    """
    ends = [0]
    for end in range(1, len(segments) + 1):
        together = [matrix for segment in segments[ends[-1] : end] for matrix in segment]
        _, load = owners(together, world_size)
        is_even = max(load) * world_size <= sum(load) * (1 + _UNEVENNESS)
        numel = sum(prod(matrix.shape) for matrix in together)
        if any(load) and is_even and numel >= _LEAST_NUMEL * world_size:
            ends.append(end)
    ends[max(1, len(ends) - 1) :] = [len(segments)]
    return [range(begin, end) for begin, end in pairwise(ends)]


class BufferSlice(NamedTuple):
    """Consecutive elements of a buffer."""

    offset: int
    numel: int


class ReceivedPiece(NamedTuple):
    """A piece that the owner of its matrix receives.

    Attributes:
        receive_offset: of its first element in the receive buffer.
        matrix_offset: of its first element among the unsharded matrices.
        numel: elements, at least 1.
    """

    receive_offset: int
    matrix_offset: int
    numel: int


@dataclass(frozen=True)
class Batch:
    """Owned matrices of one shape, one after the other.

    Attributes:
        shape: of each.
        offset: of the first element among the unsharded matrices.
        matrices: their indices.
    """

    shape: tuple[int, int]
    offset: int
    matrices: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return len(self.matrices) * self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Exchange:
    """One rank's part in sending pieces to owners; the results are sent back with both sides
    swapped.

    Attributes:
        sent: elements for each rank, padding included.
        received: elements from each rank.
        send_slices: for each matrix, this rank's piece in the send buffer; it may be empty.
        received_pieces: pieces of the matrices that this rank owns.
        batches: these matrices, by shape.
        matrices_numel: elements of the buffer of these matrices.
        travels: False if every matrix is where it is orthogonalised.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    send_slices: tuple[BufferSlice, ...]
    received_pieces: tuple[ReceivedPiece, ...]
    batches: tuple[Batch, ...]
    matrices_numel: int
    travels: bool

    @classmethod
    def of(cls, matrices: Sequence[Matrix], world_size: int, rank: int) -> Exchange:
        """Plans the exchange of a bucket, for one rank.

        Args:
            matrices: in an order that all ranks share.
            world_size: ranks of the shard group.
            rank: this one.
        """
        owner_of, _ = owners(matrices, world_size)
        owned: list[list[int]] = [[] for _ in range(world_size)]
        for i in sorted(range(len(matrices)), key=lambda i: matrices[i].shape):
            owned[owner_of[i]].append(i)
        send_slices: list[BufferSlice] = [BufferSlice(0, 0)] * len(matrices)
        sent_ends = [0]
        for indices in owned:
            numels = [matrices[i].local_numel(rank) for i in indices]
            begins, end = _side_by_side(matrices, indices, numels, sent_ends[-1])
            sent_ends.append(end)
            for i, begin, numel in zip(indices, begins, numels, strict=True):
                send_slices[i] = BufferSlice(begin, numel)
        mine = owned[rank]
        wholes = [prod(matrices[i].shape) for i in mine]
        places, matrices_numel = _side_by_side(matrices, mine, wholes, 0)
        received: list[ReceivedPiece] = []
        received_ends = [0]
        for source in range(world_size):
            numels = [matrices[i].local_numel(source) for i in mine]
            begins, end = _side_by_side(matrices, mine, numels, received_ends[-1])
            received_ends.append(end)
            for i, place, begin, numel in zip(mine, places, begins, numels, strict=True):
                if numel:
                    row = matrices[i].rows(source)[0]
                    received.append(ReceivedPiece(begin, place + row * matrices[i].shape[1], numel))
        return cls(
            tuple(end - begin for begin, end in pairwise(sent_ends)),
            tuple(end - begin for begin, end in pairwise(received_ends)),
            tuple(send_slices),
            tuple(received),
            tuple(
                Batch(shape, places[mine.index(first)], (first, *others))
                for shape, (first, *others) in groupby(mine, lambda i: matrices[i].shape)
            ),
            matrices_numel,
            travels=any(matrix.home is None for matrix in matrices),
        )


def _side_by_side(
    matrices: Sequence[Matrix], indices: Sequence[int], numels: Sequence[int], begin: int
) -> tuple[list[int], int]:
    """Lays out pieces of these matrices, which are sorted by shape.

    Returns:
        Where each begins, and where the next message may.
    """
    begins: list[int] = []
    for _, alike in groupby(zip(indices, numels, strict=True), lambda x: matrices[x[0]].shape):
        for _, numel in alike:
            begins.append(begin)
            begin += numel
        begin = -(-begin // _ALIGNMENT_NUMEL) * _ALIGNMENT_NUMEL
    return begins, begin
