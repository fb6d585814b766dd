"""Where elements live: properties of shard layouts, for any shapes and any world size."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardgrad.sharding.layout import TAG_NUMEL, ShardLayout, alignment_numel
from shardgrad.sharding.zero_copy import ZERO_COPY_NBYTES, is_zero_copy

NCCL_NBYTES = 128  # pointers that are not multiples of this take its slow path
SHAPES = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)
WORLD_SIZES = st.integers(1, 64)


def layout_of(
    shapes: list[tuple[int, ...]], world_size: int, *, with_flags: bool = False
) -> ShardLayout:
    return ShardLayout.of(shapes, world_size, alignment=32, with_flags=with_flags)


@given(SHAPES, WORLD_SIZES, st.booleans())
def test_pieces_do_not_overlap_and_fit(
    shapes: list[tuple[int, ...]], world_size: int, tail: bool
) -> None:
    layout = layout_of(shapes, world_size, with_flags=tail)
    end = 0
    for piece in layout.pieces:
        assert piece.shard_offset == end
        assert piece.span >= piece.shard_numel
        end = piece.shard_offset + piece.span
    assert layout.tail_offset == end
    assert layout.tail_numel >= (len(shapes) if tail else 0) + TAG_NUMEL


@given(SHAPES, WORLD_SIZES, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_every_pointer_is_aligned_on_every_rank(
    shapes: list[tuple[int, ...]], world_size: int, dtype: torch.dtype
) -> None:
    layout = ShardLayout.of(shapes, world_size, alignment=alignment_numel([dtype]), with_flags=True)
    offsets = [offset for p in layout.pieces for offset in (p.shard_offset, p.unsharded_offset)]
    offsets += [layout.tail_offset, layout.chunk_numel]
    assert all(offset * dtype.itemsize % NCCL_NBYTES == 0 for offset in offsets)


@given(SHAPES, st.sampled_from([(4, 2), (6, 3), (8, 4), (12, 2)]))
def test_unsharded_offsets_do_not_depend_on_the_world_size(
    shapes: list[tuple[int, ...]], sizes: tuple[int, int]
) -> None:
    """An int reshard gathers from fewer ranks into the same buffer."""
    large, small = (layout_of(shapes, size) for size in sizes)
    assert [p.unsharded_offset for p in large.pieces] == [p.unsharded_offset for p in small.pieces]


@given(SHAPES, WORLD_SIZES)
def test_views_alias_the_buffer_they_come_from(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    layout = layout_of(shapes, world_size)
    chunk = torch.zeros(layout.chunk_numel)
    for view, piece in zip(layout.local_views(chunk, 0), layout.pieces, strict=True):
        view.fill_(1)
        assert view.shape == piece.local_shape(0)
    assert chunk.sum() == sum(piece.local_numel(0) for piece in layout.pieces)
    flat = torch.zeros(layout.unsharded_numel)
    for view in layout.whole.local_views(flat, 0):
        view.fill_(1)
    assert flat.sum() == sum(piece.numel for piece in layout.pieces)


@given(SHAPES, WORLD_SIZES, st.lists(st.booleans(), min_size=6, max_size=6))
def test_what_is_not_direct_is_the_end_of_a_chunk_and_laid_out_alike(
    shapes: list[tuple[int, ...]], world_size: int, chosen: list[bool]
) -> None:
    direct = chosen[: len(shapes)]
    layout = ShardLayout.of(shapes, world_size, alignment=32, with_flags=True, zero_copy=direct)
    ends = {i: piece.shard_offset + piece.span for i, piece in enumerate(layout.pieces)}
    assert all(ends[i] <= layout.packed_offset for i in layout.zero_copy)
    chunk = torch.arange(layout.chunk_numel)
    rest = layout.packed.local_views(chunk[layout.packed_offset :], 0)
    everything = layout.local_views(chunk, 0)
    for i, view in zip(layout.others, rest, strict=True):
        assert torch.equal(view, everything[i])
        assert layout.packed.pieces[layout.others.index(i)].unsharded_offset == (
            layout.pieces[i].unsharded_offset
        )
    assert layout.packed.chunk_numel == len(chunk) - layout.packed_offset
    assert layout.packed.tail_numel == layout.tail_numel
    plain = layout_of(shapes, world_size, with_flags=True)
    assert layout.chunk_numel == plain.chunk_numel
    assert sorted([*layout.zero_copy, *layout.others]) == list(range(len(shapes)))


def test_small_uneven_and_crosswise_parameters_are_not_direct() -> None:
    def is_direct(shape: tuple[int, ...], dim: int = 0) -> bool:
        return is_zero_copy(shape, dim, 2, alignment=32, dtype=torch.float32)

    elements = ZERO_COPY_NBYTES // torch.float32.itemsize
    assert is_direct((2, elements))
    assert not is_direct((2, elements - 32))
    assert not is_direct((3, elements))
    assert not is_direct((2, 2 * elements), dim=1)
    assert not is_direct((2, elements + 1))  # the other rank's part would not be aligned


def test_the_tail_is_packed_like_one_more_parameter() -> None:
    layout = layout_of([(4, 3), (5,)], 2, with_flags=True)
    assert layout.table_with_tail.tolist()[-1] == [64, 32, 32, layout.tail_offset, 0]
    assert torch.equal(layout.table_with_tail[:-1], layout.table)


def test_alignment_serves_the_narrowest_dtype() -> None:
    assert alignment_numel([torch.float32, torch.bfloat16]) == 64
    assert alignment_numel([torch.float32]) == 32
