"""Segments: the parameters of one launch, and the table of their offsets in memory.

A *segment* is the parameters of one group that one optimizer group treats alike. Its parameters,
gradients and optimizer states lie in flat 1-D tensors; its table has a row for each parameter, or
several, one after the other, for pieces of it that do not lie together in all of these:

| column | meaning |
|---|---|
| param_offset | first element in the parameters' flat tensor |
| grad_offset | first element in the gradients' |
| state_offset | first element in each state's: moments, momentum, master |
| numel | elements of the row; 0 is legal |
| step_index | which element of `steps` counts this parameter's updates, once for all of its rows |
| flag_index | which element of `touched` says whether the parameter got a gradient |
| first_tile | number of tiles before this row; a row is cut into tiles of `TILE_NUMEL` elements |

Unlike the table of the movement ops, it lies on the device of the data: it changes only when the
model does, and 10,000 parameters are one launch. So a launch cannot check it without waiting for
the device. CPU kernels, which use the same tables, check them in every call, since that is cheap
there.

A row is *live* if `touched[flag_index] > 0`. A row that is not live is neither read nor written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TILE_NUMEL = 2048
"""Elements of a tile, the unit of work of a kernel; csrc/segment.h has the same number."""


class Row(NamedTuple):
    """A parameter of a segment, or a piece of one; the module's docstring has the meanings."""

    param_offset: int
    grad_offset: int
    state_offset: int
    numel: int
    step_index: int
    flag_index: int
    first_tile: int


def segment_rows(pieces: Sequence[tuple[int, int, int, int, int, int]]) -> tuple[Tensor, int]:
    """Builds the table of a segment.

    Args:
        pieces: one (param_offset, grad_offset, state_offset, numel, step_index, flag_index) per
            parameter.

    Returns:
        The table, int64 [parameters, 7] on the CPU; and the number of tiles, which the ops ask for.
    """
    rows, tiles = [], 0
    for piece in pieces:
        rows.append([*piece, tiles])
        tiles += -(-piece[3] // TILE_NUMEL)
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 7), tiles


def live_rows(touched: Tensor, rows: Tensor) -> Iterator[Row]:
    """Yields the rows whose parameter got a gradient. Reads the device."""
    flags = touched.tolist()
    for values in rows.tolist():
        row = Row(*values)
        if flags[row.flag_index] > 0:
            yield row
