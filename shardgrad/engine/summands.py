"""What a rank has received, still to be added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardgrad import ops

__all__ = ["PendingSum"]


class PendingSum:
    """What adds up to a chunk: for each stretch of it, the contributions of all ranks.

    Args:
        stretches: the first element of each, how many it has, and its summands: 1-D, as long as the stretch.
    """

    def __init__(self, stretches: Sequence[tuple[int, int, Sequence[torch.Tensor]]]) -> None:
        self._stretches = stretches

    def __bool__(self) -> bool:
        return bool(self._stretches)

    def plus(self, chunk: torch.Tensor) -> PendingSum:
        """Returns these and a whole chunk more."""
        return PendingSum(
            [
                (begin, numel, [*summands, chunk.narrow(0, begin, numel)])
                for begin, numel, summands in self._stretches
            ]
        )

    def add_up(self, out: torch.Tensor, *, divisor: float = 1.0, accumulate: bool = False) -> None:
        """Computes the sum; see `ops.sum_chunks`, which takes the same arguments.

        Args:
            out: the whole chunk. It may be among the summands, each stretch in its place.
            divisor: what the sum is divided by.
            accumulate: add to what `out` holds.

        Streams: on the current one. Capture: safe.
        """
        for begin, numel, summands in self._stretches:
            stretch = out if numel == out.numel() else out.narrow(0, begin, numel)
            ops.sum_chunks(summands, stretch, divisor=divisor, accumulate=accumulate)
