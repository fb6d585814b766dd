"""Packing and unpacking parameters that are sharded on a dim other than the outermost.

If `[4, 6]` is sharded on dim 1 over two ranks, a rank's piece is a tensor `[4, 3]`, contiguous in
its chunk but four separate ranges of the parameter. Seen as `[blocks, ranks, inner]`, the parameter
is the gathered pieces, `[ranks, blocks, inner]`, with two dims exchanged. So each parameter takes
one copy in either direction.

The ops of `ops/movement.py` move all other parameters. Their docstrings also describe what these
functions share with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardgrad.ops.arithmetic import compute_dtype, divide_
from shardgrad.sharding.layout import Piece, ShardLayout


@torch.no_grad()
def unpack_strided(gathered: torch.Tensor, unsharded: torch.Tensor, layout: ShardLayout) -> None:
    """Copies the strided parameters of a layout from gathered chunks into the unsharded buffer.

    Args:
        gathered: 1-D, the chunks of all ranks in order, of `layout.chunk_numel` elements each.
        unsharded: 1-D, `layout.unsharded_numel` elements; only these parameters are written, with a
            cast.
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
    """Splits the strided gradients of a layout into all ranks' chunks, with a division and a cast.

    Args:
        grads: one contiguous tensor per parameter of the layout; those that are not strided are
            ignored. An empty tensor means that there is no gradient.
        slot: 1-D, `world_size * chunk_numel` elements; only these parameters are written.
        layout: of the chunks.
        divisor: divides the gradients, by a true division.

    Streams: the current one.
    Capture: safe. Allocates only to divide by a number other than 1.
    """
    chunks = slot.data.view(layout.world_size, layout.chunk_numel)
    for i in layout.strided:
        piece, grad = layout.pieces[i], grads[i]
        padded_from = piece.shard_numel if grad.numel() else 0
        chunks.narrow(1, piece.shard_offset + padded_from, piece.span - padded_from).zero_()
        if not grad.numel():
            continue
        value = grad.view(piece.blocks, layout.world_size, -1).transpose(0, 1)
        if divisor != 1:
            value = value.to(compute_dtype(grad, slot), copy=True)
            divide_(value, divisor)
        _pieces(chunks, piece).copy_(value)


def _pieces(chunks: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns the pieces in chunks [ranks, chunk_numel], as [ranks, blocks, inner]."""
    numel = piece.shard_numel
    return chunks[:, piece.shard_offset : piece.shard_offset + numel].view(
        len(chunks), piece.blocks, numel // piece.blocks
    )
