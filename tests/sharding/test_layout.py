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


@given(
    SHAPES,
    WORLD_SIZES,
    st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), min_size=1),
)
def test_every_pointer_is_aligned_on_every_rank(
    shapes: list[tuple[int, ...]], world_size: int, dtypes: list[torch.dtype]
) -> None:
    layout = ShardLayout.of(shapes, world_size, alignment=alignment_numel(dtypes), with_flags=True)
    offsets = [offset for p in layout.pieces for offset in (p.shard_offset, p.unsharded_offset)]
    offsets += [layout.tail_offset, layout.chunk_numel]
    nbytes = [offset * dtype.itemsize for offset in offsets for dtype in dtypes]
    assert not any(each % NCCL_NBYTES for each in nbytes)


def test_flags_and_tag_have_elements_of_their_own() -> None:
    for count in range(64):
        layout = ShardLayout.of([(1,)] * count, 2, alignment=32, with_flags=True)
        assert layout.tail_numel >= count + TAG_NUMEL


@given(SHAPES, st.sampled_from([(4, 2), (6, 3), (8, 4), (12, 2)]))
def test_unsharded_offsets_do_not_depend_on_the_world_size(
    shapes: list[tuple[int, ...]], sizes: tuple[int, int]
) -> None:
    """An int reshard gathers from fewer ranks into the same buffer."""
    large, small = (ShardLayout.of(shapes, size, alignment=32, with_flags=False) for size in sizes)
    assert [p.unsharded_offset for p in large.pieces] == [p.unsharded_offset for p in small.pieces]


def test_small_uneven_and_crosswise_parameters_are_not_direct() -> None:
    def is_direct(shape: tuple[int, ...], dim: int = 0) -> bool:
        return is_zero_copy(shape, dim, 2, alignment=32, dtype=torch.float32)

    elements = ZERO_COPY_NBYTES // torch.float32.itemsize
    assert is_direct((2, elements))
    assert not is_direct((2, elements - 32))
    assert not is_direct((3, elements))
    assert not is_direct((2, 2 * elements), dim=1)
    assert not is_direct((2, elements + 1))  # the other rank's part would not be aligned
