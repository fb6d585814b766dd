"""Large parameters travel by themselves, between where they are and where they belong, without a copy.

[Note: Direct parameters]
A group's small parameters share a message, since a message costs the same however small it is; they are put
into it, and taken out again, by a copy (`ops/movement.py`). A large parameter needs neither the company nor
the copies. If it is cut evenly along its outermost dim, its pieces in rank order *are* the whole:

    all-gather:      from the pieces in the shards, straight into the whole parameter
    reduce-scatter:  straight from the gradient that autograd has made

Which parameters are direct is a fact of shapes, dtypes and the mesh, the same on every rank, and so are the
sizes and the order of messages: first the packed one, which carries flags and label, then one for each direct
parameter. What a message could not carry as it is travels in the packed one like all others: parameters that
are gathered over two levels, from fewer ranks, from the host or through a program's own collectives, and
gradients that are cast or divided before they travel, or that were summed on this rank before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["ZERO_COPY_NBYTES", "is_zero_copy"]

# Bytes of a rank's piece on the wire, from which on a message of its own costs less than the copies that it
# saves. Measured: docs/design/zero_copy_parameters.md.
ZERO_COPY_NBYTES = 2 * 2**20


def is_zero_copy(
    shape: Sequence[int], dim: int, world_size: int, *, alignment: int, dtype: torch.dtype
) -> bool:
    """Returns whether a parameter is direct. See [Note: Direct parameters].

    Args:
        shape: of the whole.
        dim: along which it is cut.
        world_size: ranks it is cut over.
        alignment: elements; every rank's part of the whole has to start on a multiple.
        dtype: in which it is gathered.
    """
    if world_size == 1 or dim != 0 or shape[0] % world_size:
        return False
    piece_numel = math.prod(shape) // world_size
    return piece_numel % alignment == 0 and piece_numel * dtype.itemsize >= ZERO_COPY_NBYTES
