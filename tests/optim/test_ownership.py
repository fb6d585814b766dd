"""Every matrix has one owner, work is balanced, and both sides of an exchange agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgrad.optim.ownership import Exchange, Matrix, buckets, owners

matrix_shapes = st.tuples(st.integers(0, 40), st.integers(1, 30))
stack_shapes = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 30))
shapes = st.lists(matrix_shapes | stack_shapes, min_size=1, max_size=20)
worlds = st.integers(1, 64)
few = settings(max_examples=60, deadline=None)


def cut_over(shapes: list[tuple[int, ...]], world_size: int) -> list[Matrix]:
    return [m for shape in shapes for m in Matrix.all_of(shape, 1, world_size)]


@few
@given(shapes, worlds)
def test_no_rank_works_more_than_the_mean_and_one_matrix(
    matrices: list[tuple[int, ...]], world_size: int
) -> None:
    cuts = cut_over(matrices, world_size)
    chosen, load = owners(cuts, [0] * world_size)
    assert load == [
        sum(m.work for m, owner in zip(cuts, chosen, strict=True) if owner == rank)
        for rank in range(world_size)
    ]
    stay = max(sum(m.work for m in cuts if m.home == rank) for rank in range(world_size))
    assert max(load) <= max(stay, sum(load) / world_size + max(m.work for m in cuts))


@pytest.mark.parametrize(
    ("shape", "num_heads", "homes"),
    [
        ((4, 6, 5), 1, [0, 0, 1, 1]),  # experts, of which no rank has a part
        ((12, 5), 4, [0, 0, 1, 1]),
        ((12, 5), 3, [0, None, 1]),
        ((3, 4, 5), 2, [0, 0, 0, 0, 1, 1]),
    ],
)
def test_a_matrix_that_is_whole_on_a_rank_stays_there(
    shape: tuple[int, ...], num_heads: int, homes: list[int | None]
) -> None:
    matrices = Matrix.all_of(shape, num_heads, 2)
    assert [matrix.home for matrix in matrices] == homes
    chosen, _ = owners(matrices, [0, 0])
    assert all(home in (None, owner) for home, owner in zip(homes, chosen, strict=True))
    assert Exchange.of(matrices, chosen, 2, 0).travels == (None in homes)


@few
@given(shapes, worlds)
def test_only_padding_travels_besides_the_pieces(
    matrices: list[tuple[int, ...]], world_size: int
) -> None:
    cuts = cut_over(matrices, world_size)
    ((_, chosen),) = buckets([cuts], world_size)
    for rank in range(world_size):
        exchange = Exchange.of(cuts, chosen, world_size, rank)
        pieces = [(torch.empty(shape).chunk(world_size), shape) for shape in matrices]
        mine = sum(cut[rank].numel() for cut, _ in pieces if rank < len(cut))
        assert mine <= sum(exchange.sent) < mine + 64 * len(cuts) + 1
        assert not any(batch.offset % 64 for batch in exchange.batches)  # 128 bytes


LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)] + [(14336, 4096)] * 2
LLAMA_8B += [(4096, 14336)]


@pytest.mark.parametrize(
    ("world_size", "number", "most"),
    [(8, 17, 1.032), (16, 8, 1.001), (32, 4, 1.001), (64, 2, 1.058)],
)
def test_eight_billion_parameters_keep_all_ranks_busy(
    world_size: int, number: int, most: float
) -> None:
    """What the slowest rank takes, of the time of Newton-Schulz if it were evenly divided."""
    matrices = cut_over(LLAMA_8B, world_size)
    found = list(buckets([matrices] * 32, world_size))
    assert len(found) == number
    assert [i for indices, _ in found for i in indices] == list(range(32))
    begin = end = [0] * world_size
    for indices, chosen in found:
        # Its pieces are sent when the bucket before is begun.
        begin = [max(*begin, own) for own in end]
        end = list(begin)
        for matrix, rank in zip(matrices * len(indices), chosen, strict=True):
            end[rank] += matrix.work
    mean = 32 * sum(matrix.work for matrix in matrices) / world_size
    assert max(end) / mean < most
