"""Which rank orthogonalises which matrix, and the layout of the buffers they are exchanged in;
integers only.

[Note: Owned matrices]
Newton-Schulz needs an unsharded matrix. So every matrix has one *owner* in its shard group. The
owner receives the pieces of all ranks, orthogonalises the matrix and sends the results back: two
exchanges, each an all-to-all. A rank never holds a matrix that it does not own.

Matrices are exchanged in *buckets*: consecutive segments that together have enough work for every
rank. A unit with seven matrices on 64 ranks would leave 57 of them idle, and one bucket for the
model would need staging for the model; a bucket ends as soon as no single matrix is more than a
rank's fair share.

      send buffer, rank 0:    | matrices' pieces, rank 0 | pad | matrices' pieces, rank 1 | pad |
      receive buffer, rank 0: | pieces from rank 0 | pad | pieces from rank 1 | pad | ...
      matrices, rank 0:       | matrices of one shape | pad | matrices of another shape | pad | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from shardgrad.sharding.layout import Piece, ShardLayout

__all__ = ["Batch", "BufferSlice", "Exchange", "ReceivedPiece", "buckets", "owners", "work"]

Shape = tuple[int, int]

# Every batch, and what is sent between two ranks, starts on a multiple of so many elements: 128
# bytes in bfloat16, for the reason given in layout.py.
_ALIGNMENT_NUMEL = 64


def work(shape: Sequence[int]) -> int:
    """Returns the multiplications of one Newton-Schulz step for a matrix, at least 1.

    With s the shorter side and l the longer: `s^2 l` for the Gram matrix, `s^3` for its square,
    `s^2 l` for the product with the matrix.
    """
    short, long = sorted(shape)
    return max(1, short * short * (2 * long + short))


def owners(shapes: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """Chooses an owner for each matrix, so that ranks have about equal work.

    The heaviest matrix that is left goes to the rank with the least work; ties go to the lower
    index, so all ranks choose alike. No rank gets more than the mean and one matrix.

    Args:
        shapes: of the matrices.
        world_size: ranks of the shard group.

    Returns:
        One rank per matrix.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    load = [0] * world_size
    chosen = [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: (-work(shapes[i]), i)):
        rank = min(range(world_size), key=lambda rank: (load[rank], rank))
        chosen[i] = rank
        load[rank] += work(shapes[i])
    return chosen


def buckets(segments: Sequence[Sequence[Sequence[int]]], world_size: int) -> list[range]:
    """Divides segments, in order, into buckets.

    Args:
        segments: for each, the shapes of its matrices.
        world_size: ranks of the shard group.

    Returns:
        Ranges of indices that cover all segments. Every bucket but the last has at least
        `world_size` times the work of its heaviest matrix, and would not without its last segment.
    """
    cut = []
    begin = total = heaviest = 0
    for i, shapes in enumerate(segments):
        costs = [work(shape) for shape in shapes]
        total += sum(costs)
        heaviest = max([heaviest, *costs])
        if total and total >= world_size * heaviest:
            cut.append(range(begin, i + 1))
            begin, total, heaviest = i + 1, 0, 0
    if begin < len(segments):
        cut.append(range(begin, len(segments)))
    return cut


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

    shape: Shape
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
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    send_slices: tuple[BufferSlice, ...]
    received_pieces: tuple[ReceivedPiece, ...]
    batches: tuple[Batch, ...]
    matrices_numel: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], world_size: int, rank: int) -> Exchange:
        """Plans the exchange of a bucket, for one rank.

        Args:
            shapes: global shapes of the matrices, in an order that all ranks share.
            world_size: ranks of the shard group.
            rank: this one.
        """
        pieces = ShardLayout.of(shapes, world_size, alignment=1, with_flags=False).pieces
        owned: list[list[int]] = [[] for _ in range(world_size)]
        for matrix, owner in enumerate(owners(shapes, world_size)):
            owned[owner].append(matrix)
        send_slices: list[BufferSlice] = [BufferSlice(0, 0)] * len(shapes)
        sent_ends = [0]
        for matrices in owned:
            numels = [pieces[matrix].local_numel(rank) for matrix in matrices]
            begins, end = _side_by_side(numels, sent_ends[-1])
            sent_ends.append(end)
            for matrix, begin, numel in zip(matrices, begins, numels, strict=True):
                send_slices[matrix] = BufferSlice(begin, numel)
        batches, places, matrices_numel = _batches(pieces, owned[rank])
        received: list[ReceivedPiece] = []
        received_ends = [0]
        for source in range(world_size):
            numels = [pieces[matrix].local_numel(source) for matrix in owned[rank]]
            begins, end = _side_by_side(numels, received_ends[-1])
            received_ends.append(end)
            for matrix, begin, numel in zip(owned[rank], begins, numels, strict=True):
                if numel:
                    row = pieces[matrix].rows(source)[0]
                    place = places[matrix] + row * pieces[matrix].shape[1]
                    received.append(ReceivedPiece(begin, place, numel))
        return cls(
            tuple(end - begin for begin, end in pairwise(sent_ends)),
            tuple(end - begin for begin, end in pairwise(received_ends)),
            tuple(send_slices),
            tuple(received),
            batches,
            matrices_numel,
        )


def _side_by_side(numels: Sequence[int], begin: int) -> tuple[list[int], int]:
    """Returns where each of consecutive runs begins, and where the next message may."""
    *begins, end = accumulate(numels, initial=begin)
    return begins, -(-end // _ALIGNMENT_NUMEL) * _ALIGNMENT_NUMEL


def _batches(
    pieces: Sequence[Piece], matrices: Sequence[int]
) -> tuple[tuple[Batch, ...], dict[int, int], int]:
    """Lays out the matrices of a rank: batches by shape, where each matrix begins, and the buffer's
    size.
    """
    by_shape: dict[Shape, list[int]] = {}
    for matrix in matrices:
        rows, columns = pieces[matrix].shape
        by_shape.setdefault((rows, columns), []).append(matrix)
    batches: list[Batch] = []
    places: dict[int, int] = {}
    end = 0
    for shape, alike in by_shape.items():
        batches.append(Batch(shape, end, tuple(alike)))
        begins, end = _side_by_side([shape[0] * shape[1]] * len(alike), end)
        places.update(zip(alike, begins, strict=True))
    return tuple(batches), places, end
