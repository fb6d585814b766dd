"""Gradients cut along any dim, against `torch.chunk`, and put together again.

Sums are in random and kept programs that cut by columns.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardgrad import ops
from shardgrad.sharding.layout import ShardLayout
from shardgrad.sharding.strided_pack import pack_strided, unpack_strided


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


@given(cut_shapes(), st.sampled_from([1.0, 3.0]), st.integers(0, 5))
def test_packing_cuts_and_unpacking_puts_together(
    case: tuple[list[tuple[int, ...]], list[int], int], divisor: float, missing: int
) -> None:
    """Packs everything, as the engine does; one gradient may be missing."""
    shapes, dims, world_size = case
    layout = ShardLayout.of(shapes, world_size, alignment=32, with_flags=True, dims=dims)
    assert world_size > 1 or not layout.strided  # sums of one rank are added to what is packed
    grads = [torch.randn(shape) * (i != missing) for i, shape in enumerate(shapes)]
    sent = [torch.empty(0) if i == missing else grad for i, grad in enumerate(grads)]
    slot = torch.full((layout.world_size * layout.chunk_numel,), 7.0)
    pack_strided(sent, slot, layout, divisor=divisor)
    straight = [grad for i, grad in enumerate(sent) if i not in layout.strided]
    ops.pack(straight, slot, layout.table, chunk_numel=layout.chunk_numel, divisor=divisor)
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
