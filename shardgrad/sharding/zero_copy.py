"""Large parameters that are sent and received in place, without a copy.

[Note: Zero-copy parameters]
A group's small parameters share one message, since a message has a fixed cost, and are copied into
it and out of it (`ops/movement.py`). A large parameter needs neither copy. If it is sharded evenly
on its outermost dim, its pieces in rank order *are* the parameter:

    all-gather:      from the pieces in the shards directly into the unsharded parameter
    reduce-scatter:  directly from the gradient that autograd has created

Shapes, dtypes, settings and the mesh decide which parameters are zero-copy, so every rank decides
alike, as it does about the sizes and the order of messages. The packed message, which has the
touched flags, comes first, then one message for each zero-copy parameter. The packed message also
takes parameters whose shard is not what is sent, and gradients that are divided before they are
sent or sent in another dtype. Gradients that were summed on this rank are copied, but sent
as messages of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# Bytes of one rank's piece from which on a separate message costs less than the copies that it
# saves. Measured: docs/design/parameters.md.
ZERO_COPY_NBYTES = 2 * 2**20


def is_zero_copy(
    shape: Sequence[int], dim: int, world_size: int, *, alignment: int, dtype: torch.dtype
) -> bool:
    """Returns whether a parameter is zero-copy. See [Note: Zero-copy parameters].

    Args:
        shape: global.
        dim: the sharded dim.
        world_size: number of ranks it is sharded over.
        alignment: elements; every rank's part must start on a multiple of it.
        dtype: the dtype in which it is gathered.
    """
    if world_size == 1 or dim != 0 or shape[0] % world_size:
        return False
    piece_numel = math.prod(shape) // world_size
    return piece_numel % alignment == 0 and piece_numel * dtype.itemsize >= ZERO_COPY_NBYTES
