"""Large parameters that are sent from where they are and received where they belong, without a
copy.

[Note: Zero-copy parameters]
A group's small parameters share a message, since a message costs the same however small it is; they
are copied into it, and out of it again (`ops/movement.py`). A large parameter needs neither. If it
is sharded evenly on its outermost dim, its pieces in rank order *are* the parameter:

    all-gather:      from the pieces in the shards, straight into the unsharded parameter
    reduce-scatter:  straight from the gradient that autograd has made

Which parameters are zero-copy is a fact of shapes, dtypes and the mesh, the same on every rank, and
so are the sizes and the order of messages: first the packed one, which carries the touched flags,
then one for each zero-copy parameter. What a message could not carry as it is goes into the packed
one like all others: parameters whose `AllGather` says that it does not support zero-copy, and
gradients that are cast or divided before they are sent, or that were summed on this rank before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardgrad.sharding.layout import ShardLayout

__all__ = ["ZERO_COPY_NBYTES", "is_zero_copy", "own_places"]

# Bytes of a rank's piece on the wire, from which on a separate message costs less than the copies
# that it saves. Measured: docs/design/parameters.md.
ZERO_COPY_NBYTES = 2 * 2**20


def is_zero_copy(
    shape: Sequence[int], dim: int, world_size: int, *, alignment: int, dtype: torch.dtype
) -> bool:
    """Returns whether a parameter is zero-copy. See [Note: Zero-copy parameters].

    Args:
        shape: global.
        dim: that is sharded.
        world_size: ranks it is sharded over.
        alignment: elements; every rank's part has to start on a multiple.
        dtype: in which it is gathered.
    """
    if world_size == 1 or dim != 0 or shape[0] % world_size:
        return False
    piece_numel = math.prod(shape) // world_size
    return piece_numel % alignment == 0 and piece_numel * dtype.itemsize >= ZERO_COPY_NBYTES


def own_places(layout: ShardLayout, rank: int) -> torch.Tensor:
    """Returns the table with which `ops.unpack` writes a rank's zero-copy pieces, and nothing else.

    From its shard alone, to their places in the flat unsharded buffer.
    """
    pieces = (layout.pieces[i] for i in layout.zero_copy)
    rows = [
        [
            p.shard_numel,
            p.shard_numel,
            p.span,
            p.shard_offset,
            p.unsharded_offset + rank * p.shard_numel,
        ]
        for p in pieces
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 5)
