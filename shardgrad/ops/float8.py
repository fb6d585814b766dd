"""Float32 in blocks of float8 with a scale, and sums of such blocks: `quantize`, `sum_quantized`.

[Note: Float8 blocks]
A block is 128 values. Each is sent as a *code*, a float8_e4m3fn, and the block as one more byte,
its *exponent*: a value is the code times `2**(exponent - 127)`. The exponent is the smallest by
which all finite values of the block fit below 448, the largest code; as scales are powers of two, a
value's 4 significant bits are those nearest to it, and scaling rounds nothing. A value that is not
finite has the code of NaN, and has no influence on the scale.

What the codes have lost is kept as float8, too, with the same exponent less 4: half a unit of the
largest code is 16, so 16 times the loss fits. `quantize` adds what is kept of the last message to
the next. What is not kept either is a sixteenth of a sixteenth: a value arrives, over two messages,
to 2**-8 of itself, as it would in bfloat16.

A block of zeros is sent as zeros, and what is kept of it stays: a rank without a gradient for a
parameter owes what it owed.

Messages: a row is `row_numel` codes, then its exponents, one for each 128 codes, then room, in
`row_nbytes` altogether. A kept loss is all its codes, then all its exponents. Both are uint8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardgrad.ops.checks import check_memory
from shardgrad.ops.library import declare

__all__ = ["FLOAT8_BLOCK_NUMEL", "quantize", "sum_quantized"]

FLOAT8_BLOCK_NUMEL = 128

_ONE = 127  # the exponent of a scale of 1
_LEAST = 9  # and the least one, by which a loss has a normal float32 as its scale
_LOSS = 4  # a loss has a scale smaller by so many powers of two
_LARGEST = 448.0


def quantize(
    values: Tensor,
    kept: Tensor,
    message: Tensor,
    *,
    row_numel: int,
    row_nbytes: int,
    period: int,
    tail_offset: int,
) -> None:
    """Writes `values + kept` into a message's rows, and what the message has lost of it into
    `kept`.

    See [Note: Float8 blocks]. In each `period` of the values, those from `tail_offset` on are flags
    and counts: they travel with a scale of 1, at most 448, and nothing is kept of them.

    Args:
        values: 1-D contiguous float32, a multiple of 128.
        kept: uint8, a byte for each value and one for each block; zeros at first.
        message: uint8, 1-D contiguous, `row_nbytes` for each `row_numel` values that have begun.
            What the values do not fill is not written.
        row_numel: values of a row, a multiple of 128.
        row_nbytes: bytes of a row.
        period: values, a multiple of 128.
        tail_offset: at most `period`, and a multiple of 128.

    Streams:
        Runs on the current stream of the device of `values`.

    Capture:
        Safe: the compiled kernel allocates nothing; the reference allocates some times the size of
        `values`.

    Raises:
        RuntimeError: the arguments disagree.
    """
    _quantize(values, kept, message, row_numel, row_nbytes, period, tail_offset)


def sum_quantized(
    messages: Sequence[Tensor], out: Tensor, *, row_numel: int, row_nbytes: int
) -> None:
    """Computes `out = messages[0] + messages[1] + ...` in float32, from left to right.

    Args:
        messages: of `quantize`, all with rows for `out`.
        out: 1-D contiguous float32, a multiple of 128; written. None of the messages lies in it.
        row_numel: values of a row.
        row_nbytes: bytes of a row.

    Streams:
        Runs on the current stream of the device of `out`.

    Capture:
        Safe: the compiled kernel allocates nothing; the reference allocates some times the size of
        `out`.

    Raises:
        RuntimeError: the arguments disagree.
    """
    _sum_quantized(messages, out, row_numel, row_nbytes)


def _check(message: Tensor, values: Tensor, row_numel: int, row_nbytes: int) -> int:
    """Returns the number of rows that the values begin."""
    if values.dtype != torch.float32 or message.dtype != torch.uint8:
        raise RuntimeError("values must be float32, and messages and what is kept uint8")
    if row_numel <= 0 or any(n % FLOAT8_BLOCK_NUMEL for n in (values.numel(), row_numel)):
        raise RuntimeError(f"values and rows must be multiples of {FLOAT8_BLOCK_NUMEL}")
    rows = -(-values.numel() // row_numel)
    if (
        row_nbytes < row_numel + row_numel // FLOAT8_BLOCK_NUMEL
        or message.numel() < rows * row_nbytes
    ):
        raise RuntimeError(
            f"a message of {message.numel()} bytes has no room for {values.numel()} values"
        )
    check_memory("messages", message, values)
    check_memory("values", values, values)
    return rows


def _power(exponents: Tensor) -> Tensor:
    """Returns `2**(exponent - 127)`, and 0 for an exponent of 0 or below."""
    return exponents.clamp(min=0).bitwise_left_shift(23).view(torch.float32).unsqueeze(1)


def _decode(codes: Tensor, exponents: Tensor) -> Tensor:
    """Returns blocks of values, [blocks, 128], from codes and the exponents of their scales
    (int32).
    """
    codes = codes.view(torch.float8_e4m3fn).view(-1, FLOAT8_BLOCK_NUMEL)
    return codes.float().mul_(_power(exponents))


def _encode(values: Tensor, exponents: Tensor) -> Tensor:
    """Returns codes as bytes, [blocks, 128]; NaN where a value is not finite."""
    scaled = values * _power(2 * _ONE - exponents)
    scaled = scaled.where(values.isfinite(), torch.nan)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


@torch.no_grad()
def _quantize_reference(
    values: Tensor,
    kept: Tensor,
    message: Tensor,
    row_numel: int,
    row_nbytes: int,
    period: int,
    tail_offset: int,
) -> None:
    rows, numel, block = (
        _check(message, values, row_numel, row_nbytes),
        values.numel(),
        FLOAT8_BLOCK_NUMEL,
    )
    if period <= 0 or period % block or tail_offset % block or not 0 <= tail_offset <= period:
        raise RuntimeError(f"a tail at {tail_offset} of {period} values")
    if kept.dtype != torch.uint8 or kept.numel() != numel + numel // block:
        raise RuntimeError(f"{kept.numel()} bytes are not what is kept of {numel} values")
    check_memory("what is kept", kept, values)
    kept_codes, kept_exponents = kept.data.split([numel, numel // block])
    fresh = values.view(-1, block)
    places = torch.arange(numel // block, device=values.device).mul_(block)
    is_tail = (places.remainder_(period) >= tail_offset).unsqueeze(1)
    is_empty = (fresh == 0).all(1, keepdim=True)
    owed = _decode(kept_codes, kept_exponents.int() - _LOSS)
    total = fresh.clamp(max=_LARGEST).where(is_tail, fresh + owed.masked_fill(is_empty, 0))
    largest = total.abs().where(total.isfinite(), 0).amax(1).view(torch.int32)
    exponents = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000)
    exponents = exponents.clamp_(min=_LEAST).masked_fill_(is_empty.squeeze(1), 0)
    exponents = exponents.masked_fill_(is_tail.squeeze(1), _ONE)
    codes = _encode(total, exponents)
    lost = total - _decode(codes, exponents)
    lost = lost.where(lost.isfinite(), 0)
    stays = is_tail | is_empty
    losses = _encode(lost, exponents - _LOSS).where(~stays, kept_codes.view(-1, block))
    kept_codes.copy_(losses.view(-1))
    kept_exponents.copy_(exponents.to(torch.uint8).where(~stays.squeeze(1), kept_exponents))
    flat, exponents = codes.view(-1), exponents.to(torch.uint8)
    for row in range(rows):
        begin, end = row * row_numel, min((row + 1) * row_numel, numel)
        into = message.data.narrow(0, row * row_nbytes, row_nbytes)
        into[: end - begin].copy_(flat[begin:end])
        into[row_numel:][: (end - begin) // block].copy_(exponents[begin // block : end // block])


@torch.no_grad()
def _sum_quantized_reference(
    messages: Sequence[Tensor], out: Tensor, row_numel: int, row_nbytes: int
) -> None:
    if not messages:
        raise RuntimeError("there is nothing to read from")
    for begin in range(0, out.numel(), row_numel):
        into = out.data[begin : begin + row_numel]
        at, exponents = begin // row_numel * row_nbytes, into.numel() // FLOAT8_BLOCK_NUMEL
        for i, message in enumerate(messages):
            _check(message, out, row_numel, row_nbytes)
            row = message.narrow(0, at, row_nbytes)
            part = _decode(row[: into.numel()], row[row_numel:][:exponents].int()).view(-1)
            into.copy_(part) if i == 0 else into.add_(part)


declare(
    "quantize(Tensor values, Tensor(a!) kept, Tensor(b!) message, int row_numel, int row_nbytes, "
    "int period, "
    "int tail_offset)",
    _quantize_reference,
)
declare(
    "sum_quantized(Tensor[] messages, Tensor(a!) out, int row_numel, int row_nbytes)",
    _sum_quantized_reference,
)

_quantize = torch.ops.shardgrad.quantize.default
_sum_quantized = torch.ops.shardgrad.sum_quantized.default
