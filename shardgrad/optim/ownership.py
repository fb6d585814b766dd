"""Which rank orthogonalises which matrix, and where its pieces lie while they travel; integers only.

[Note: Owned matrices]
Newton-Schulz needs a matrix whole. Every matrix therefore has one *owner* in its shard group. Its pieces
travel there, it is orthogonalised there and nowhere else, and the results travel back: two exchanges, each
an all-to-all of this rank's pieces. No rank ever holds a matrix that it does not own.

Matrices are exchanged in *waves*: consecutive segments that together have enough work to keep every rank
busy. A unit with seven matrices on 64 ranks would leave 57 of them idle, one wave for the whole model would
need staging for the whole model; a wave is as long as it takes until no single matrix is more than a rank's
fair share.

      outgoing, rank 0:  | pieces of matrices of rank 0 | pad | pieces of matrices of rank 1 | pad | ...
      incoming, rank 0:  | pieces from rank 0 | pad | pieces from rank 1 | pad | ...
      whole,    rank 0:  | matrices of one shape | pad | matrices of another shape | pad | ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardgrad.sharding.layout import Piece, ShardLayout

__all__ = ["Arrival", "Batch", "Exchange", "Run", "owners", "waves", "work"]

Shape = tuple[int, int]

# What travels between two ranks, and every batch, starts on a multiple of so many elements: 128 bytes in
# bfloat16, for the reason given in layout.py.
_EDGE_NUMEL = 64


def work(shape: Sequence[int]) -> int:
    """Returns the multiplications of one Newton-Schulz step for a matrix, at least 1.

    With s the shorter side and l the longer: `s^2 l` for the Gram matrix, `s^3` for its square, `s^2 l` for
    the product with the matrix.
    """
    short, long = sorted(shape)
    return max(1, short * short * (2 * long + short))


def owners(shapes: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """Chooses an owner for each matrix, so that ranks have about equal work.

    The heaviest matrix that is left goes to the rank with the least work; ties go to the lower index, so all
    ranks choose alike. No rank gets more than the mean and one matrix.

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


def waves(segments: Sequence[Sequence[Sequence[int]]], world_size: int) -> list[range]:
    """Cuts segments, in order, into waves.

    Args:
        segments: for each, the shapes of its matrices.
        world_size: ranks of the shard group.

    Returns:
        Ranges of indices that cover all segments. Every wave but the last has at least `world_size` times
        the work of its heaviest matrix, and would not without its last segment.
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


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a buffer."""

    offset: int
    numel: int


@dataclass(frozen=True)
class Arrival:
    """A piece that comes to its owner.

    Attributes:
        matrix: its index.
        source: the rank it comes from.
        incoming: first element among what arrives.
        whole: first element among whole matrices.
        numel: elements, at least 1.
    """

    matrix: int
    source: int
    incoming: int
    whole: int
    numel: int


@dataclass(frozen=True)
class Batch:
    """Owned matrices of one shape, one after the other.

    Attributes:
        shape: of each.
        offset: first element among whole matrices.
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
    """One rank's part in bringing matrices to their owners; the way back is the same with both sides swapped.

    Attributes:
        owners: a rank per matrix.
        sent: elements for each rank, padding included.
        received: elements from each rank.
        departures: for each matrix, where this rank's piece lies among what is sent; maybe empty.
        arrivals: pieces of the matrices this rank owns.
        batches: these matrices, by shape.
        whole_numel: elements of the buffer that holds them.
    """

    owners: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    departures: tuple[Run, ...]
    arrivals: tuple[Arrival, ...]
    batches: tuple[Batch, ...]
    whole_numel: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], world_size: int, rank: int) -> Exchange:
        """Plans the exchange of a wave, for one rank.

        Args:
            shapes: global shapes of the matrices, in an order that all ranks share.
            world_size: ranks of the shard group.
            rank: this one.
        """
        pieces = ShardLayout.of(shapes, world_size, alignment=1, with_flags=False).pieces
        chosen = owners(shapes, world_size)
        departures: list[Run] = [Run(0, 0)] * len(shapes)
        sent: list[int] = []
        for owner in range(world_size):
            parcel, numel = _parcel(pieces, chosen, owner, source=rank)
            for matrix, run in parcel:
                departures[matrix] = Run(sum(sent) + run.offset, run.numel)
            sent.append(numel)
        batches, places, whole_numel = _batches(pieces, chosen, rank)
        arrivals: list[Arrival] = []
        received: list[int] = []
        for source in range(world_size):
            parcel, numel = _parcel(pieces, chosen, rank, source=source)
            for matrix, run in parcel:
                if run.numel:
                    begin = pieces[matrix].rows(source)[0] * pieces[matrix].shape[1]
                    incoming = sum(received) + run.offset
                    arrivals.append(Arrival(matrix, source, incoming, places[matrix] + begin, run.numel))
            received.append(numel)
        return cls(
            tuple(chosen),
            tuple(sent),
            tuple(received),
            tuple(departures),
            tuple(arrivals),
            batches,
            whole_numel,
        )


def _parcel(
    pieces: Sequence[Piece], chosen: Sequence[int], owner: int, *, source: int
) -> tuple[list[tuple[int, Run]], int]:
    """Lays out what one rank sends another: (matrix, run) in order, and the number of elements."""
    parcel, offset = [], 0
    for matrix, piece in enumerate(pieces):
        if chosen[matrix] == owner:
            parcel.append((matrix, Run(offset, piece.local_numel(source))))
            offset += piece.local_numel(source)
    return parcel, _up_to_edge(offset)


def _batches(
    pieces: Sequence[Piece], chosen: Sequence[int], rank: int
) -> tuple[tuple[Batch, ...], dict[int, int], int]:
    """Lays out the matrices of a rank: batches by shape, where each matrix begins, and the buffer's size."""
    by_shape: dict[Shape, list[int]] = {}
    for matrix, piece in enumerate(pieces):
        if chosen[matrix] == rank:
            by_shape.setdefault((piece.shape[0], piece.shape[1]), []).append(matrix)
    batches, places, offset = [], {}, 0
    for shape, matrices in by_shape.items():
        batch = Batch(shape, offset, tuple(matrices))
        for i, matrix in enumerate(matrices):
            places[matrix] = offset + i * shape[0] * shape[1]
        batches.append(batch)
        offset += _up_to_edge(batch.numel)
    return tuple(batches), places, offset


def _up_to_edge(numel: int) -> int:
    return -(-numel // _EDGE_NUMEL) * _EDGE_NUMEL
