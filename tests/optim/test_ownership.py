"""Every matrix has one owner, work is balanced, and both sides of an exchange agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgrad.optim.ownership import Exchange, buckets, owners, work

shapes = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=20)
worlds = st.integers(1, 64)
few = settings(max_examples=60, deadline=None)


def all_exchanges(matrices: list[tuple[int, int]], world_size: int) -> list[Exchange]:
    return [Exchange.of(matrices, world_size, rank) for rank in range(world_size)]


@few
@given(shapes, worlds)
def test_no_rank_works_more_than_the_mean_and_one_matrix(
    matrices: list[tuple[int, int]], world_size: int
) -> None:
    costs = [work(shape) for shape in matrices]
    load = [0] * world_size
    for owner, cost in zip(owners(matrices, world_size), costs, strict=True):
        load[owner] += cost
    assert max(load) <= sum(costs) / world_size + max(costs)


@few
@given(st.integers(1, 64), st.integers(1, 5))
def test_equal_matrices_are_dealt_out_evenly(world_size: int, rounds: int) -> None:
    chosen = owners([(8, 8)] * (world_size * rounds), world_size)
    assert [chosen.count(rank) for rank in range(world_size)] == [rounds] * world_size


def test_a_heavy_matrix_is_not_joined_by_light_ones() -> None:
    assert owners([(4, 4), (64, 64), (4, 4), (4, 4)], 2) == [1, 0, 1, 1]


def test_the_cost_of_a_matrix_does_not_depend_on_its_orientation() -> None:
    # 2 products of 3 x 5 by 5 x 3, and one of 3 x 3 by 3 x 3
    assert work((3, 5)) == work((5, 3)) == 2 * 3 * 3 * 5 + 3 * 3 * 3


@few
@given(shapes, worlds)
def test_what_one_rank_sends_is_what_the_other_expects(
    matrices: list[tuple[int, int]], world_size: int
) -> None:
    exchanges = all_exchanges(matrices, world_size)
    for sender, ours in enumerate(exchanges):
        assert [theirs.received[sender] for theirs in exchanges] == list(ours.sent)


@few
@given(shapes, worlds)
def test_only_padding_travels_besides_the_pieces(
    matrices: list[tuple[int, int]], world_size: int
) -> None:
    for rank, exchange in enumerate(all_exchanges(matrices, world_size)):
        pieces = [(torch.empty(shape).chunk(world_size), shape) for shape in matrices]
        mine = sum(cut[rank].numel() for cut, _ in pieces if rank < len(cut))
        assert mine <= sum(exchange.sent) < mine + 64 * min(world_size, len(matrices)) + 1


@settings(max_examples=25, deadline=None)
@given(shapes, worlds)
def test_every_matrix_arrives_whole_at_its_owner(
    matrices: list[tuple[int, int]], world_size: int
) -> None:
    exchanges = all_exchanges(matrices, world_size)
    wholes = [
        torch.arange(rows * columns).view(rows, columns) + 10_000 * i
        for i, (rows, columns) in enumerate(matrices)
    ]
    cuts = [whole.chunk(world_size) for whole in wholes]
    outgoing = []
    for rank, exchange in enumerate(exchanges):
        buffer = torch.full((sum(exchange.sent),), -1)
        for cut, run in zip(cuts, exchange.send_slices, strict=True):
            piece = cut[rank].flatten() if rank < len(cut) else buffer[:0]
            assert piece.numel() == run.numel
            buffer[run.offset : run.offset + run.numel] = piece
        outgoing.append(buffer.split(list(exchange.sent)))
    for rank, exchange in enumerate(exchanges):
        incoming = torch.cat([parts[rank] for parts in outgoing])
        whole = torch.full((exchange.matrices_numel,), -1)
        for arrival in exchange.received_pieces:
            piece = incoming[arrival.receive_offset : arrival.receive_offset + arrival.numel]
            whole[arrival.matrix_offset : arrival.matrix_offset + arrival.numel] = piece
        seen = []
        for batch in exchange.batches:
            assert batch.offset % 64 == 0
            found = whole[batch.offset : batch.offset + batch.numel].view(
                len(batch.matrices), *batch.shape
            )
            for matrix, values in zip(batch.matrices, found, strict=True):
                assert torch.equal(values, wholes[matrix])
                seen.append(matrix)
        chosen = owners(matrices, world_size)
        assert sorted(seen) == [i for i, owner in enumerate(chosen) if owner == rank]


@given(st.lists(shapes, min_size=1, max_size=12), worlds)
@few
def test_waves_cover_all_segments_and_are_as_short_as_balance_allows(
    segments: Any, world_size: int
) -> None:
    cut = buckets(segments, world_size)
    assert [i for bucket in cut for i in bucket] == list(range(len(segments)))

    def is_balanced(bucket: range) -> bool:
        costs = [work(shape) for i in bucket for shape in segments[i]]
        return sum(costs) >= world_size * max(costs, default=1)

    assert all(is_balanced(bucket) for bucket in cut[:-1])
    assert not any(is_balanced(bucket[:-1]) for bucket in cut if len(bucket) > 1)


@pytest.mark.parametrize(("world_size", "expected"), [(1, 4), (3, 4), (6, 2), (8, 2), (64, 1)])
def test_a_wave_is_longer_the_more_ranks_there_are(world_size: int, expected: int) -> None:
    assert len(buckets([[(8, 8)] * 4] * 4, world_size)) == expected
