"""Every matrix has one owner, work is balanced, and both sides of an exchange agree."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgrad.optim import ownership
from shardgrad.optim.ownership import Exchange, Matrix, buckets, owners
from shardgrad.programs.plan.cost import CostModel
from shardgrad.programs.plan.hardware import machine_of
from shardgrad.programs.plan.recording import Kernel, Transfer

shapes = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=20)
worlds = st.integers(1, 64)
few = settings(max_examples=60, deadline=None)


def cut_over(matrices: list[tuple[int, int]], world_size: int) -> list[Matrix]:
    return [m for shape in matrices for m in Matrix.all_of(shape, 1, world_size)]


def all_exchanges(matrices: list[tuple[int, int]], world_size: int) -> list[Exchange]:
    cuts = cut_over(matrices, world_size)
    return [Exchange.of(cuts, world_size, rank) for rank in range(world_size)]


@few
@given(shapes, worlds)
def test_no_rank_works_more_than_the_mean_and_one_matrix(
    matrices: list[tuple[int, int]], world_size: int
) -> None:
    cuts = cut_over(matrices, world_size)
    chosen, load = owners(cuts, world_size)
    assert load == [
        sum(m.work for m, owner in zip(cuts, chosen, strict=True) if owner == rank)
        for rank in range(world_size)
    ]
    stay = max(sum(m.work for m in cuts if m.home == rank) for rank in range(world_size))
    assert max(load) <= max(stay, sum(load) / world_size + max(m.work for m in cuts))


def test_a_heavy_matrix_is_not_joined_by_light_ones() -> None:
    assert owners(cut_over([(4, 4), (64, 64), (4, 4), (4, 4)], 2), 2)[0] == [1, 0, 1, 1]


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
    chosen, _ = owners(matrices, 2)
    assert all(home in (None, owner) for home, owner in zip(homes, chosen, strict=True))
    assert Exchange.of(matrices, 2, 0).travels == (None in homes)


def test_the_cost_of_a_matrix_does_not_depend_on_its_orientation() -> None:
    # 2 products of 3 x 5 by 5 x 3, and one of 3 x 3 by 3 x 3
    flat, tall = cut_over([(3, 5), (5, 3)], 1)
    assert flat.work == tall.work == 2 * 3 * 3 * 5 + 3 * 3 * 3


@few
@given(shapes, worlds)
def test_only_padding_travels_besides_the_pieces(
    matrices: list[tuple[int, int]], world_size: int
) -> None:
    for rank, exchange in enumerate(all_exchanges(matrices, world_size)):
        pieces = [(torch.empty(shape).chunk(world_size), shape) for shape in matrices]
        mine = sum(cut[rank].numel() for cut, _ in pieces if rank < len(cut))
        assert mine <= sum(exchange.sent) < mine + 64 * len(matrices) + 1


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
        chosen, _ = owners(cut_over(matrices, world_size), world_size)
        assert sorted(seen) == [i for i, owner in enumerate(chosen) if owner == rank]


@given(st.lists(shapes, min_size=1, max_size=12), worlds, st.integers(0, 2000))
@few
def test_buckets_cover_all_segments_and_end_where_no_rank_waits(
    shapes_of: Any, world_size: int, least: int
) -> None:
    segments = [cut_over(matrices, world_size) for matrices in shapes_of]
    with mock.patch.object(ownership, "_LEAST_NUMEL", least):
        found = buckets(segments, world_size)
    assert [i for bucket in found for i in bucket] == list(range(len(segments)))

    def waits(bucket: range) -> bool:
        together = [m for i in bucket for m in segments[i]]
        _, load = owners(together, world_size)
        is_small = sum(m.shape[0] * m.shape[1] for m in together) < least * world_size
        return is_small or not any(load) or max(load) * world_size > 1.05 * sum(load)

    assert not any(waits(bucket) for bucket in found[:-1])
    assert all(waits(bucket[:-1]) for bucket in found[:-1] if len(bucket) > 1)


LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)] + [(14336, 4096)] * 2
LLAMA_8B += [(4096, 14336)]

# Bytes that pass for each element that a rank has, in float32: gradient, momentum and message;
# the copies into matrices and back; result and weight.
PASSED_NBYTES = 14 + 8 + 10
ADAMW_NBYTES = 28  # weight, two moments and the gradient are read, all but the last written


def kernel_s(cost: CostModel, *, flops: float = 0.0, nbytes: float = 0.0) -> float:
    return cost.kernel_s(
        Kernel("compute", "", "optimizer", True, flops, 0.0, "bf16", round(nbytes))
    )


@pytest.mark.parametrize(
    ("world_size", "number", "waiting", "milliseconds"),
    [
        (8, 6, 0.8, (121, 10, 8, 9)),
        (16, 3, 2.5, (62, 5, 22, 5)),
        (32, 1, 0.1, (30, 3, 16, 2)),
        (64, 1, 5.8, (16, 1, 10, 1)),
    ],
)
def test_eight_billion_parameters_keep_all_ranks_busy(
    world_size: int, number: int, waiting: float, milliseconds: tuple[int, ...]
) -> None:
    """Of the time of Newton-Schulz the percent for which a rank waits for the slowest. By the
    planner's roofline on H100s the milliseconds of Newton-Schulz, of passes over memory, of the
    exchanges, and of AdamW over the same matrices.
    """
    segments = [cut_over(LLAMA_8B, world_size)] * 32
    found = buckets(segments, world_size)
    loads = [owners([m for i in each for m in segments[i]], world_size)[1] for each in found]
    assert len(found) == number
    mean = sum(map(sum, loads)) / world_size
    slowest = sum(map(max, loads))
    assert 100 * (slowest / mean - 1) < waiting
    cost = CostModel(machine_of("h100"), world_size)
    numel = 32 * sum(rows * columns for rows, columns in LLAMA_8B)
    sent = [2 * len(each) * numel // 32 // world_size for each in found]  # bytes of a rank, bf16
    exchanges = [Transfer("compute", "exchange", "shard", world_size, n, 0) for n in sent]
    seconds = (
        kernel_s(cost, flops=2 * 5 * slowest),  # five steps, two operations a multiplication
        kernel_s(cost, nbytes=PASSED_NBYTES * numel / world_size),
        2 * sum(map(cost.transfer_s, exchanges)),
        kernel_s(cost, nbytes=ADAMW_NBYTES * numel / world_size),
    )
    assert tuple(round(1e3 * each) for each in seconds) == milliseconds
