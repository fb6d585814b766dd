"""Moving pieces that are sharded on a later dim than the outermost.

`[4, 6]` sharded on dim 1 over two ranks: a rank's piece is a tensor `[4, 3]`, contiguous in its
chunk, and four separate ranges of the parameter. Seen as `[blocks, ranks, inner]` the parameter is
the gathered pieces, `[ranks, blocks, inner]`, with two dims exchanged, so that each parameter is
one copy there and one back.

The ops of `ops/movement.py` move everything else, and say what these functions have in common with
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardgrad.ops.arithmetic import compute_dtype, divide_
from shardgrad.sharding.layout import Piece, ShardLayout

__all__ = ["pack_strided", "unpack_strided"]


@torch.no_grad()
def unpack_strided(gathered: torch.Tensor, unsharded: torch.Tensor, layout: ShardLayout) -> None:
    """Puts the strided parameters of a layout together.

    Args:
        gathered: 1-D, the chunks of all ranks in order, of `layout.chunk_numel` elements each.
        unsharded: 1-D, `layout.unsharded_numel` elements; written, and cast, where these parameters
            lie.
        layout: with `world_size` chunks.

    Streams: the current one. Capture: safe; allocates nothing, reads nothing back.
    """
    chunks = gathered.view(-1, layout.chunk_numel)
    for piece in map(layout.pieces.__getitem__, layout.strided):
        param = unsharded.data.narrow(0, piece.unsharded_offset, piece.numel)
        param = param.view(piece.blocks, layout.world_size, -1)
        param.copy_(_pieces(chunks, piece).transpose(0, 1))


@torch.no_grad()
def pack_strided(
    grads: Sequence[torch.Tensor],
    slot: torch.Tensor,
    layout: ShardLayout,
    *,
    divisor: float,
) -> None:
    """Cuts the strided gradients of a layout, and writes them, scaled and cast, into all ranks'
    chunks.

    Args:
        grads: one contiguous tensor per parameter of the layout; those that are not strided are
            left alone. One with no elements stands for "no gradient this time".
        slot: 1-D, `world_size * chunk_numel` elements; written where these parameters lie.
        layout: of the chunks.
        divisor: what gradients are divided by; a true division.

    Streams: the current one.
    Capture: safe. Allocates only to divide by something else than 1.
    """
    chunks = slot.data.view(layout.world_size, layout.chunk_numel)
    for i in layout.strided:
        piece, grad = layout.pieces[i], grads[i]
        padded_from = piece.shard_numel if grad.numel() else 0
        if padded_from < piece.span:
            chunks.narrow(1, piece.shard_offset + padded_from, piece.span - padded_from).zero_()
        if not grad.numel():
            continue
        value = grad.view(piece.blocks, layout.world_size, -1).transpose(0, 1)
        if divisor != 1:
            value = value.to(compute_dtype(grad, slot), copy=True)
            divide_(value, divisor)
        _pieces(chunks, piece).copy_(value)


def _pieces(chunks: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns the pieces that lie in chunks [ranks, chunk_numel], as [ranks, blocks, inner]."""
    numel = piece.shard_numel
    return chunks[:, piece.shard_offset : piece.shard_offset + numel].view(
        len(chunks), piece.blocks, numel // piece.blocks
    )
