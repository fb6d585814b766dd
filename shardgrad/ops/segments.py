"""Segments: the parameters of one launch, and the table of their places in memory.

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

Unlike the table of the movement ops it lies on the device of the data: it changes only when the
model does, and 10,000 parameters are one launch. A kernel therefore cannot check it without a wait,
so the code that builds a table calls `check_rows`, once. Kernels for the CPU check it again in
every call, where that is cheap.

A row is *live* if `touched[flag_index] > 0`. A row that is not live is neither read nor written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardgrad.errors import OptionError
from shardgrad.ops.checks import check_data, check_memory

__all__ = ["TILE_NUMEL", "Row", "check_rows", "check_segment", "live_rows", "segment_rows"]

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


def check_rows(
    rows: Tensor,
    tiles: int,
    *,
    param_numel: int | None = None,
    grad_numel: int | None = None,
    state_numel: int | None = None,
    steps_numel: int | None = None,
    touched_numel: int | None = None,
) -> None:
    """Checks that a table stays inside the tensors it is made for, and that its rows do not
    overlap.

    Args:
        rows: the table, on the CPU.
        tiles: what `segment_rows` returned with it.
        param_numel: elements of the parameters' flat tensor; None if no op will see one with these
            rows.
        grad_numel: the same of the gradients.
        state_numel: the same of every state.
        steps_numel: the same of `steps`.
        touched_numel: the same of `touched`.

    Raises:
        OptionError: the table is not one, or reaches outside, or two rows share an element that is
            written.
    """
    if (
        rows.device.type != "cpu"
        or rows.dtype != torch.int64
        or rows.dim() != 2
        or rows.shape[1] != 7
    ):
        raise OptionError(
            "this is not the table of a segment",
            expected="int64 [parameters, 7] on the CPU, as segment_rows builds it",
            got=f"{rows.dtype} {list(rows.shape)} on {rows.device}",
        )
    # A column of the table under each name.
    starts: Any = Row(*rows.unbind(1))  # type: ignore[arg-type]
    counts = (starts.numel + TILE_NUMEL - 1).div(TILE_NUMEL, rounding_mode="floor")
    if not torch.equal(starts.first_tile, counts.cumsum(0) - counts) or tiles != int(counts.sum()):
        raise OptionError(
            "the tiles of a segment's table do not add up",
            expected=f"first_tile to count the tiles of {TILE_NUMEL} before each row, and {tiles} "
            "in all",
            got=f"{int(counts.sum())} tiles",
            fix="build the table with segment_rows",
        )
    numel, one = starts.numel, torch.ones_like(starts.numel)
    of_param = torch.stack((starts.step_index, starts.flag_index), 1)
    is_first = one.clone()  # of the rows of its parameter
    is_first[1:] = (of_param[1:] != of_param[:-1]).any(1)
    _check_column(rows, "param_offset", starts.param_offset, numel, param_numel, is_written=True)
    _check_column(rows, "grad_offset", starts.grad_offset, numel, grad_numel)
    _check_column(rows, "state_offset", starts.state_offset, numel, state_numel, is_written=True)
    _check_column(rows, "step_index", starts.step_index, is_first, steps_numel, is_written=True)
    _check_column(rows, "flag_index", starts.flag_index, one, touched_numel)


def _check_column(
    rows: Tensor,
    name: str,
    begin: Tensor,
    counts: Tensor,
    limit: int | None,
    *,
    is_written: bool = False,
) -> None:
    """Checks the ranges [begin, begin + counts) against [0, limit), and for overlaps if
    `is_written`.
    """
    if limit is None:
        return
    outside = (begin < 0) | (counts < 0) | (begin > limit) | (begin + counts > limit)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise OptionError(
            f"row {first} of a segment's table reaches outside its tensor",
            expected=f"{name} and what lies there to stay within {limit} elements",
            got=str(Row(*rows[first].tolist())),
        )
    if is_written:
        order = begin[counts > 0].argsort(stable=True)
        begin, counts = begin[counts > 0][order], counts[counts > 0][order]
        overlap = begin[1:] < begin[:-1] + counts[:-1]
        if overlap.any():
            raise OptionError(
                "two rows of a segment's table share elements that the update writes",
                expected=f"ranges that begin at {name} without a common element",
                got=f"a row that begins at {int(begin[1:][overlap][0])}, inside the one before it",
            )


def check_segment(
    touched: Tensor,
    rows: Tensor,
    tiles: int,
    target: Tensor,
    limits: dict[str, int],
) -> None:
    """Refuses a table, or `touched`, that the references could not use.

    Args:
        touched: see the module's docstring.
        rows: the table.
        tiles: their number.
        target: a tensor on the device where everything must be.
        limits: elements of the tensor that each offset points into, by the name of its column.

    Raises:
        RuntimeError: the arguments disagree.
    """
    check_data("touched", [touched], target)
    check_memory("rows", rows, target)
    if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != 7:
        raise RuntimeError("rows must be int64 of shape [parameters, 7]")
    total = 0
    limits = limits | {"flag_index": touched.numel()}
    for i, values in enumerate(rows.tolist()):
        row = Row(*values)
        reach = dict.fromkeys(("param_offset", "grad_offset", "state_offset"), row.numel)
        fits = all(
            0 <= getattr(row, name) <= limit - reach.get(name, 1) for name, limit in limits.items()
        )
        if row.numel < 0 or not fits or row.first_tile != total:
            raise RuntimeError(f"row {i} does not fit the tensors of its segment: {row}")
        total += -(-row.numel // TILE_NUMEL)
    if total != tiles:
        raise RuntimeError(f"rows have {total} tiles, but tiles says {tiles}")


def live_rows(touched: Tensor, rows: Tensor) -> Iterator[Row]:
    """Yields the rows whose parameter got a gradient. Reads the device."""
    flags = touched.tolist()
    for values in rows.tolist():
        row = Row(*values)
        if flags[row.flag_index] > 0:
            yield row
