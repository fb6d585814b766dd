"""What messages in float8 bring and keep, in plain float64: the oracle of `ops/float8.py`.

Written from the format's definition: codes are looked up in a table of all there are, scales are
searched.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def _table() -> Tensor:
    """Returns the values of the codes 0 to 126: 4 bits of exponent, biased by 7, and 3 of
    significand.
    """
    values = []
    for code in range(127):
        exponent, significand = divmod(code, 8)
        values.append(
            significand * 2.0**-9
            if exponent == 0
            else (1 + significand / 8) * 2.0 ** (exponent - 7)
        )
    return torch.tensor(values, dtype=torch.float64)


TABLE = _table()


def nearest(values: Tensor) -> Tensor:
    """Returns the values of the nearest codes; of two as near, the one whose last bit is 0."""
    size = values.abs()
    above = torch.searchsorted(TABLE, size).clamp(max=126)
    below = (above - 1).clamp(min=0)
    to_above, to_below = TABLE[above] - size, size - TABLE[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return torch.where(takes_above, TABLE[above], TABLE[below]).copysign(values)


def blocks_of(values: Tensor) -> Tensor:
    """Returns values in blocks, the last one filled up with zeros, in float64."""
    flat = values.reshape(-1).double()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


class Sender:
    """Sends values of one shape again and again, and keeps what that loses."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def send(self, values: Tensor) -> Tensor:
        """Returns what arrives, in float32."""
        fresh = blocks_of(values)
        kept = torch.zeros_like(fresh) if self.kept is None else self.kept.clone()
        arrives = torch.zeros_like(fresh)
        for i, block in enumerate(fresh):
            if (block == 0).all():
                continue  # what is kept stays
            total = (block.float() + kept[i].float()).double()
            is_finite = total.isfinite()
            largest = total[is_finite].abs().max().item() if is_finite.any() else 0.0
            scale = 2.0**-118
            while largest / scale > 448:
                scale *= 2
            arrives[i] = torch.where(is_finite, nearest(total / scale) * scale, torch.nan)
            arrives[i] = arrives[i].float()  # which has no room for more than 2**128
            lost = torch.where(arrives[i].isfinite(), total - arrives[i], 0.0)
            kept[i] = nearest(lost / scale * 16) * scale / 16
        self.kept = kept
        return arrives.view(-1)[: values.numel()].view(values.shape).float()
