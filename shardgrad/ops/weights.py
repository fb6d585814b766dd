"""Storage of exact parameter values between updates, for the references of update.py.

[Note: Exact weights]
A parameter of a half-width dtype loses most of an update to rounding. Three ways to keep it:

- a float32 *master* holds the exact value, and the parameter is that value rounded to nearest even.
  The last write counts: where the parameter's bits are not those of the rounded master, the program
  has written it (a checkpoint was loaded), and the update starts from the parameter;
- an int16 *remainder*, for bfloat16 only, holds the lower half of the float32 value's bits, as a
  signed number, and the parameter is the upper half, rounded half up. Together they are the exact
  value in 4 bytes. A parameter that the program writes keeps its old remainder, at most half of its
  last place;
- *stochastic rounding*, for bfloat16 only, stores nothing: the parameter is rounded up or down with
  a probability that makes it right on average. The coin is a hash of seed, step and the element's
  index, so the same run gives the same bits on every device. Infinities and NaNs stay what they
  are.

csrc/update_math.h computes the same, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**32 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, made odd


def load_weight(param: Tensor, master: Tensor | None, compute: torch.dtype) -> Tensor:
    """Returns the exact value of a parameter, in a new tensor.

    Args:
        param: one parameter, 1-D, as stored.
        master: its exact value, float32; or its remainder, int16; or None.
        compute: dtype of the result.
    """
    if master is None:
        return param.to(compute, copy=True)
    if master.dtype == torch.int16:
        bits = (param.view(torch.int16).int() << 16) + master.int()
        return bits.view(torch.float32)
    foreign = param.view(torch.int16) != master.to(param.dtype).view(torch.int16)
    return torch.where(foreign, param.float(), master)


def store_weight(
    value: Tensor, param: Tensor, master: Tensor | None, key: int | None, first: int
) -> None:
    """Stores the exact value of a parameter.

    Args:
        value: what to store.
        param: written.
        master: written, if there is one.
        key: of this step's `dither`, for stochastic rounding; None rounds to nearest.
        first: index of the parameter's first element, for `dither`.
    """
    if master is None and key is not None:
        bits = value.view(torch.int32).long() & _MASK
        rounded = (bits + dither(key, first, value.numel(), value.device)) >> 16
        rounded = torch.where(value.isnan(), 0x7FC0, rounded)
        param.copy_(rounded.to(torch.int16).view(torch.bfloat16))
    elif master is not None and master.dtype == torch.int16:
        bits = torch.where(value.isnan(), 0x7FC00000, value.view(torch.int32).long() & _MASK)
        master.copy_(bits.to(torch.int16))
        param.copy_(((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16))
    else:
        if master is not None:
            master.copy_(value)
        param.copy_(value)


def dither_key(seed: int, step: int) -> int:
    """Returns a 64-bit key, so that the noise differs from step to step."""
    return _mix64(_mix64((seed + _GOLDEN) % 2**64) + step * _GOLDEN)


def _mix64(x: int) -> int:
    # The output function of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
    # generators", 2014, with Stafford's constants.
    x %= 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def _mix32(x: Tensor) -> Tensor:
    # A bijection of 32 bits with low bias, found by search: Wellons, "Prospecting for hash
    # functions", 2018. A product wraps at 64 bits, and its lower 32 are those that the kernels get.
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def dither(key: int, first: int, numel: int, device: torch.device) -> Tensor:
    """Returns int64 noise in [0, 65536) for the elements with the indices from `first` on."""
    index = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    low, high = index & _MASK, ((index >> 32) * (_GOLDEN >> 32)) & _MASK
    mixed = _mix32(low ^ (key & _MASK))
    return _mix32((mixed + (high ^ (key >> 32))) & _MASK) >> 16
