"""Pieces cut along a later dim, against `torch.chunk`; and what every layout promises, for any
dim.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardgrad import ops
from shardgrad.sharding.layout import (
    ShardLayout,
)
from shardgrad.sharding.strided_pack import pack_strided, unpack_strided

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@st.composite
def cut_shapes(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[int], int]:
    """Returns shapes, the dim each is cut along, and a number of ranks that divides those other
    than 0.
    """
    world_size = draw(st.integers(1, 8))
    shapes, dims = [], []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - 1))
        if dim:
            shape[dim] *= world_size
        shapes.append(tuple(shape))
        dims.append(dim)
    return shapes, dims, world_size


Cut = tuple[list[tuple[int, ...]], list[int], int]


def wholes(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes]


def layout_of(case: Cut, *, with_flags: bool = True) -> ShardLayout:
    shapes, dims, world_size = case
    return ShardLayout.of(shapes, world_size, alignment=32, with_flags=with_flags, dims=dims)


def packed(
    layout: ShardLayout,
    grads: list[torch.Tensor],
    slot: torch.Tensor,
    *,
    divisor: float,
    accumulate: bool,
) -> None:
    """Packs everything, as the engine does."""
    pack_strided(grads, slot, layout, divisor=divisor, accumulate=accumulate)
    straight = [grad for i, grad in enumerate(grads) if i not in layout.strided]
    ops.pack(
        straight,
        slot,
        layout.table,
        chunk_numel=layout.chunk_numel,
        divisor=divisor,
        accumulate=accumulate,
    )


@given(cut_shapes())
def test_a_piece_is_what_torch_chunk_gives_its_rank(case: Cut) -> None:
    layout = layout_of(case)
    for whole, dim, piece in zip(wholes(case[0]), case[1], layout.pieces, strict=True):
        chunks = torch.chunk(whole, layout.world_size, dim)
        for rank in range(layout.world_size):
            expected = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
            assert torch.equal(piece.of(whole, rank), expected)
            assert piece.local_shape(rank) == tuple(expected.shape)


@given(cut_shapes(), st.sampled_from([1.0, 3.0]))
def test_packing_cuts_and_unpacking_puts_together(case: Cut, divisor: float) -> None:
    layout, grads = layout_of(case), wholes(case[0])
    slot = torch.full((layout.world_size * layout.chunk_numel,), 7.0)
    packed(layout, grads, slot, divisor=divisor, accumulate=False)
    chunks = list(slot.view(layout.world_size, -1).unbind())
    for rank, chunk in enumerate(chunks):
        for view, grad, piece in zip(
            layout.local_views(chunk, rank), grads, layout.pieces, strict=True
        ):
            assert torch.equal(view, piece.of(grad, rank) / divisor)
            padding = chunk[piece.shard_offset + view.numel() : piece.shard_offset + piece.span]
            assert not padding.any()
    flat = torch.full((layout.unsharded_numel,), 7.0)
    ops.unpack(slot, flat, layout.table, chunk_numel=layout.chunk_numel)
    unpack_strided(slot, flat, layout)
    for view, grad in zip(layout.whole.local_views(flat, 0), grads, strict=True):
        assert torch.equal(view, grad / divisor)


@given(cut_shapes(), st.sampled_from([1.0, 3.0]))
def test_a_second_packing_adds_and_a_missing_gradient_adds_nothing(
    case: Cut, divisor: float
) -> None:
    layout, first, second = layout_of(case), wholes(case[0]), wholes(case[0])
    second[0] = torch.empty(0)
    slot = torch.zeros(layout.world_size * layout.chunk_numel)
    packed(layout, first, slot, divisor=divisor, accumulate=False)
    packed(layout, second, slot, divisor=divisor, accumulate=True)
    for rank, chunk in enumerate(slot.view(layout.world_size, -1).unbind()):
        views = layout.local_views(chunk, rank)
        for i, (view, piece) in enumerate(zip(views, layout.pieces, strict=True)):
            parts = (first[i], second[i]) if i else first[:1]
            total = sum(part / divisor for part in parts)
            assert torch.equal(view, piece.of(total, rank))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_missing_gradient_leaves_zeros(dtype: torch.dtype) -> None:
    layout = layout_of(([(3, 4)], [1], 2))
    slot = torch.ones(2 * layout.chunk_numel, dtype=dtype)
    pack_strided([torch.empty(0, dtype=dtype)], slot, layout, divisor=1.0, accumulate=False)
    assert not slot.view(2, -1)[:, : layout.pieces[0].span].any()


def test_values_are_rounded_once_where_they_are_stored() -> None:
    layout = layout_of(([(3, 4)], [1], 2))
    grad = torch.randn(3, 4, dtype=torch.bfloat16)
    slot = torch.zeros(2 * layout.chunk_numel)
    pack_strided([grad], slot, layout, divisor=3.0, accumulate=False)
    views = [layout.local_views(chunk, rank)[0] for rank, chunk in enumerate(slot.view(2, -1))]
    assert torch.equal(torch.cat(views, 1), grad.float() / 3)
