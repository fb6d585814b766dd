"""The norm of a segment's gradients, and whether they are finite: `norm_`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardgrad.ops.library import declare
from shardgrad.ops.segments import live_rows

NORM_SCRATCH_NUMEL = 2 * 1024 + 1
"""Elements of the scratch of `norm_`: an accumulated value for each of 1,024 workers, then a count
of non-finite elements for each, then a ticket, which is zero between calls."""


@torch.no_grad()
def norm_reference(
    out: Tensor,
    scratch: Tensor,
    flat: Tensor,
    touched: Tensor,
    rows: Tensor,
    tiles: int,
    norm_type: float = 2.0,
) -> None:
    """Adds the live rows of a segment to a norm's sum: `sum(|g| ** norm_type)`.

    The caller takes the root, after adding other segments and ranks. A segment without live rows
    changes nothing, not even the bits. For an infinite `norm_type`
    the result is the largest |g| (the smallest for minus infinity), and for 0 the number of nonzero
    elements. A NaN anywhere makes the result NaN, except for `norm_type` 0.

    The sum runs in float64, so float32 gradients cannot overflow it. It is the same bit for bit
    from run to run and for any number of threads: 1,024 workers have their tiles by number, and
    their sums are added in order.

    Args:
        out: float64, 2 elements: the accumulated value, which begins at 0, or at infinity if
            `norm_type` is minus infinity; and how many elements are infinite or NaN.
        scratch: float64, `NORM_SCRATCH_NUMEL` elements that are zero before its first use; its own
            afterwards. Calls whose order is not fixed, on several streams, need one each.
        flat: the gradients, 1-D, any of the four dtypes; read at `grad_offset`.
        touched: 1-D, any of the four dtypes; see `segments.py`.
        rows: the segment's table, on the device.
        tiles: of the table.
        norm_type: any number.

    Streams:
        Runs on the current stream of the device of `out`.

    Capture:
        Safe: the compiled kernel allocates nothing, and nothing is read back. (The reference does
        both.)
    """
    live = [
        flat.narrow(0, row.grad_offset, row.numel)
        for row in live_rows(touched, rows)
        if row.numel > 0
    ]
    bad = sum(int((~piece.isfinite()).sum()) for piece in live)
    sizes = [piece.to(torch.float64).abs() for piece in live]
    # torch's minimum and maximum propagate NaN, and so does the sum.
    total, count = out.data.view(-1).unbind()
    for size in sizes:
        if math.isinf(norm_type):
            edge = torch.maximum if norm_type > 0 else torch.minimum
            edge(total, size.amax() if norm_type > 0 else size.amin(), out=total)
        else:
            total += (size != 0).sum() if norm_type == 0 else size.pow(norm_type).sum()
    count += bad


norm_ = declare(
    "norm_(Tensor(a!) out, Tensor(b!) scratch, Tensor flat, Tensor touched, Tensor rows, int "
    "tiles, float norm_type=2.0)",
    norm_reference,
)
