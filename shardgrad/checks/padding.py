"""Warns if padding more than doubles the bytes that a unit sends.

A parameter is sharded along one dim and padded to as many rows on every rank as on the first. So
one with 4,096 rows sends as many bytes over 16,384 ranks as one with 16,384 rows. FSDP2 pads in the
same way, without a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod

from shardgrad.sharding.layout import Piece, ShardLayout

_WORTH_TELLING_NBYTES = 2**20
_MOST, _GOOD = 2.0, 1.1


class PaddingWarning(UserWarning):
    """A unit has so few rows for so many ranks that it sends mostly padding."""


def padded(pieces: Sequence[Piece], ranks: int) -> float:
    """Returns the bytes sent over `ranks` ranks, padding included, divided by the parameters'
    bytes.
    """
    numel = sum(piece.numel for piece in pieces)
    moved = 0
    for piece in pieces:
        rows = piece.shape[piece.dim]
        moved += -(-rows // ranks) * ranks * (piece.numel // rows if rows else 0)
    return moved / numel if numel else 1.0


def warn_of_padding(layout: ShardLayout, total: int, itemsize: int, kind: str) -> None:
    """Warns if parameters of a group are mostly padding, and names a mesh without it.

    Args:
        layout: the layout of the group; its world size is the size of the shard group.
        total: number of ranks, of all replicas.
        itemsize: bytes of an element.
        kind: the class name of the unit's module. Since Python shows each text once, units of one
            class warn once.
    """
    ranks = layout.world_size
    ratio = padded(layout.pieces, ranks)
    nbytes = sum(prod(piece.shape) for piece in layout.pieces) * itemsize
    if ratio <= _MOST or (ratio - 1) * nbytes < _WORTH_TELLING_NBYTES:
        return
    fewer = [count for count in range(1, ranks) if ranks % count == 0]
    best = max(count for count in fewer if count == 1 or padded(layout.pieces, count) <= _GOOD)
    fewest = min(piece.shape[piece.dim] for piece in layout.pieces if piece.numel)
    warnings.warn(
        f"shardgrad: a {kind} moves {ratio:.1f} times its bytes in each all-gather and "
        f"reduce-scatter: it is sharded over {ranks} ranks, and a parameter has {fewest} rows. "
        f"Shard over {best} ranks and replicate over {total // best}: "
        f"mesh=init_device_mesh(device, ({total // best}, {best}), "
        'mesh_dim_names=("replicate", "shard")).',
        PaddingWarning,
        stacklevel=5,  # the line that calls fully_shard
    )
