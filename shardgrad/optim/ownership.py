"""Decides which rank orthogonalizes which matrix, and lays out the exchange buffers. No tensors.

[Note: Owned matrices]
Newton-Schulz needs an unsharded matrix. So every matrix has one *owner* in its shard group. If one
rank has all of a matrix, for example that of an expert or of an attention head, that rank owns it.
For every other matrix, the owner receives the pieces of all ranks, orthogonalizes the matrix and
sends the results back: two exchanges, each an all-to-all. A rank never holds an unsharded matrix
that it does not own.

Matrices are exchanged in *buckets*, consecutive segments of about the same size. While the matrices
of one are orthogonalized, those of the next travel to their owners, and the results of the previous
one travel back (`in_turn` in `muon_bucket.py`). So only the first and the last exchange cost time,
and a rank may be one bucket ahead of the others. Work is therefore balanced over the buckets so
far, not within each: seven matrices occupy 7 of 64 ranks, and the next seven go to others. One
bucket for the model would hide nothing, and need staging memory for the whole model.

      send buffer, rank 0:    | pieces of matrices of rank 0 | pieces of matrices of rank 1 | ...
      receive buffer, rank 0: | pieces from rank 0 | pieces from rank 1 | ...
      matrices, rank 0:       | matrices of one shape | matrices of another shape | ...

Pieces are sorted by the shape of their matrix. So if nothing has to be sent, the send buffer is
also the buffer of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import NamedTuple

from shardgrad.sharding.layout import ShardLayout

# The pieces of matrices of one shape start at a multiple of this many elements: 128 bytes in
# bfloat16, for the reason given in layout.py.
_ALIGNMENT_NUMEL = 64

# On average, a bucket has at least this many elements per rank: with fewer, more ranks would wait
# for others, and launches would take longer than the computation.
_LEAST_NUMEL = 3 << 24


class Matrix(NamedTuple):
    """One matrix of a parameter, and which rank has which of its rows.

    Attributes:
        shape: rows and columns.
        begin: its first row among all rows of the parameter.
        parts: for each rank, the half-open range of the parameter's rows that it has.
    """

    shape: tuple[int, int]
    begin: int
    parts: tuple[tuple[int, int], ...]

    @classmethod
    def all_of(cls, shape: Sequence[int], num_heads: int, world_size: int) -> list[Matrix]:
        """Returns the matrices of a parameter, in memory order.

        Args:
            shape: the shape of the parameter, a matrix or a stack of matrices, sharded along dim 0.
            num_heads: the number of matrices into which the rows of each are divided.
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
        """The rank that has the whole matrix; None if it is cut."""
        end = self.begin + self.shape[0]
        whole = (r for r, (low, high) in enumerate(self.parts) if low <= self.begin and end <= high)
        return next(whole, None)

    def rows(self, rank: int) -> tuple[int, int]:
        """Returns the half-open range of the matrix's rows that a rank has."""
        low, high = (min(max(row - self.begin, 0), self.shape[0]) for row in self.parts[rank])
        return low, high

    def local_numel(self, rank: int) -> int:
        """Returns the number of the matrix's elements that a rank has."""
        begin, end = self.rows(rank)
        return (end - begin) * self.shape[1]


def owners(matrices: Sequence[Matrix], load: Sequence[int]) -> tuple[list[int], list[int]]:
    """Chooses an owner for each matrix, so that ranks have about equal work.

    A matrix that is whole on a rank stays there. The others are assigned in the order of decreasing
    work, each to the rank with the least work so far. Ties go to the lower index, so all ranks
    choose alike. From equal loads, no rank gets more than the mean work plus one matrix, unless the
    matrices that are whole on it are more.

    Args:
        matrices: in an order that all ranks share.
        load: the work that each rank of the shard group has already.

    Returns:
        One rank for each matrix, and the work of each rank then.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    chosen, load = [0] * len(matrices), list(load)
    homes = [matrix.home for matrix in matrices]
    for i in sorted(range(len(homes)), key=lambda i: (homes[i] is None, -matrices[i].work, i)):
        home = homes[i]
        rank = load.index(min(load)) if home is None else home
        chosen[i] = rank
        load[rank] += matrices[i].work
    return chosen, load


def buckets(
    segments: Sequence[Sequence[Matrix]], world_size: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Divides segments, in order, into buckets, as many as `_LEAST_NUMEL` allows.

    Args:
        segments: the matrices of each segment.
        world_size: ranks of the shard group.

    Yields:
        The indices of a bucket's segments, and the owner of each of its matrices.
    """
    numels = [sum(prod(matrix.shape) for matrix in segment) for segment in segments]
    ends = list(accumulate(numels, initial=0))
    total = max(1, ends[-1])
    count = max(1, total // (_LEAST_NUMEL * world_size))
    load = [0] * world_size
    for _, alike in groupby(range(len(segments)), lambda i: ends[i] * count // total):
        indices = list(alike)
        chosen, load = owners([matrix for i in indices for matrix in segments[i]], load)
        yield indices, chosen


class BufferSlice(NamedTuple):
    """Consecutive elements of a buffer."""

    offset: int
    numel: int


class ReceivedPiece(NamedTuple):
    """A piece that the owner of its matrix receives.

    Attributes:
        receive_offset: offset of its first element in the receive buffer.
        matrix_offset: offset of its first element in the buffer of matrices.
        numel: number of elements, at least 1.
    """

    receive_offset: int
    matrix_offset: int
    numel: int


@dataclass(frozen=True)
class Batch:
    """Owned matrices of one shape, one after the other.

    Attributes:
        shape: the shape of each.
        offset: offset of the first element in the buffer of matrices.
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
    """One rank's view of the exchange that sends pieces to owners. The results are sent back with
    `sent` and `received` swapped.

    Attributes:
        sent: number of elements sent to each rank, padding included.
        received: number of elements received from each rank.
        send_slices: for each matrix, the slice of the send buffer with this rank's piece; may be
            empty.
        received_pieces: the pieces of the matrices that this rank owns.
        batches: the matrices that this rank owns, by shape.
        matrices_numel: number of elements of the buffer of matrices.
        travels: False if every matrix is whole on its owner, so that nothing is sent.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    send_slices: tuple[BufferSlice, ...]
    received_pieces: tuple[ReceivedPiece, ...]
    batches: tuple[Batch, ...]
    matrices_numel: int
    travels: bool

    @classmethod
    def of(
        cls, matrices: Sequence[Matrix], owner_of: Sequence[int], world_size: int, rank: int
    ) -> Exchange:
        """Plans the exchange of a bucket, for one rank.

        Args:
            matrices: in an order that all ranks share.
            owner_of: the rank that owns each.
            world_size: ranks of the shard group.
            rank: this rank in the shard group.
        """
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
        The offset of each piece, and the offset at which the next message may begin.
    """
    begins: list[int] = []
    for _, alike in groupby(zip(indices, numels, strict=True), lambda x: matrices[x[0]].shape):
        for _, numel in alike:
            begins.append(begin)
            begin += numel
        begin = -(-begin // _ALIGNMENT_NUMEL) * _ALIGNMENT_NUMEL
    return begins, begin
