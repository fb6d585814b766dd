"""Data movement between unsharded parameters and chunks: `pack`, `unpack`, `sum_chunks`.

The terms are those of `sharding/layout.py`. The three ops share one contract:

Table: `ShardLayout.table`, an int64 CPU tensor [parameters, 5] with the rows (numel, shard_numel,
    span, shard_offset, unsharded_offset). It stays on the CPU whatever the data is on: launching
    needs its numbers on the host, and kernels get them by value, so a captured graph depends on no
    table in device memory.

Dtypes: float32, bfloat16, float16, float64 for every data tensor. Arithmetic runs in float32, or in
    float64 if an operand is float64, and is rounded once, to nearest even, where it is stored.

Autograd: none, and no version counter is bumped. As in FSDP2, live parameters are views of these
    buffers, and autograd must not mistake a refill for a modification by the user.

Each op exists twice: the reference here, and the compiled kernel in `csrc/` (see `library.py`),
which also refuses arguments that disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardgrad.ops.arithmetic import compute_dtype, divide_
from shardgrad.ops.library import declare

# Chunks that one sum takes on CUDA, whose addresses are parameters of one launch; also in launch.h.
MAX_SUMMANDS = 1024


class _Row(NamedTuple):
    numel: int
    shard_numel: int
    span: int
    shard_offset: int
    unsharded_offset: int


# `.data` has its own version counter, so a write through it does not bump the caller's.


@torch.no_grad()
def pack_reference(
    grads: Sequence[Tensor],
    slot: Tensor,
    table: Tensor,
    chunk_numel: int,
    divisor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Splits unsharded gradients into pieces and writes them, scaled and cast, into the chunks of
    all ranks.

    The reservation of parameter `i` in the chunk of rank `k` receives the elements of
    `grads[i] / divisor` from index `k * shard_numel` on, then zeros. Elements outside all
    reservations, such as a tail, are not written.

    Args:
        grads: one contiguous tensor per row of `table`, any shapes, dtypes may be mixed. One with
            no elements where the table expects some stands for "no gradient this time": its
            reservations become zeros.
        slot: 1-D contiguous, `world_size * chunk_numel` elements; written.
        table: see the module's docstring.
        chunk_numel: elements of one rank's chunk.
        divisor: the number by which gradients are divided, not 0. The division is a true one.
        accumulate: add to what the slot holds; padding and missing gradients then leave it as it
            is.

    Streams:
        Runs on the current stream of the slot's device.

    Capture:
        Safe: allocates nothing and reads nothing back. The addresses of `grads` are recorded.
    """
    chunks = slot.data.view(-1, max(chunk_numel, 1))
    for values, grad in zip(table.tolist(), grads, strict=True):
        row = _Row(*values)
        reserved = chunks.narrow(1, row.shard_offset, row.span)
        if grad.numel() > 0:
            _pack_one(grad.view(-1), reserved, row.shard_numel, divisor, accumulate)
        elif not accumulate:
            reserved.zero_()


def _pack_one(
    flat: Tensor, reserved: Tensor, shard_numel: int, divisor: float, accumulate: bool
) -> None:
    """Writes a 1-D gradient into its reservations, [world_size, span]: full ones, a short one,
    empty ones.
    """
    full, rest = divmod(flat.numel(), shard_numel)
    if divisor != 1:
        flat = flat.to(compute_dtype(flat, reserved), copy=True)
        divide_(flat, divisor)
    pairs = [(reserved[:full, :shard_numel], flat[: full * shard_numel].view(full, shard_numel))]
    if rest:
        pairs.append((reserved[full, :rest], flat[full * shard_numel :]))
    for into, value in pairs:
        if accumulate:
            into.copy_(into.to(compute_dtype(flat, reserved)) + value)
        else:
            into.copy_(value)
    if not accumulate:
        reserved[:full, shard_numel:].zero_()
        reserved[full : full + 1, rest:].zero_()
        reserved[full + 1 :].zero_()


@torch.no_grad()
def unpack_reference(gathered: Tensor, unsharded: Tensor, table: Tensor, chunk_numel: int) -> None:
    """Assembles unsharded parameters from the pieces of all ranks: the inverse of `pack`.

    Args:
        gathered: 1-D contiguous, the chunks of all ranks side by side, `world_size * chunk_numel`
            elements. One tensor and a stride, so that one launch serves any number of ranks.
        unsharded: 1-D contiguous; element `unsharded_offset` on is written, `numel` elements per
            parameter, cast where the dtypes differ. What lies between parameters is never touched.
        table: see the module's docstring.
        chunk_numel: elements of one rank's chunk.

    Streams:
        Runs on the current stream of the device of `unsharded`.

    Capture:
        Safe: allocates nothing and reads nothing back. The address of `gathered` is recorded.
    """
    unpack_rows(gathered, unsharded.data, table.tolist(), chunk_numel)


def unpack_rows(
    gathered: Tensor, unsharded: Tensor, rows: Sequence[Sequence[int]], chunk_numel: int
) -> None:
    """Does what `unpack` does with the rows of a table, in any dtype and without checks."""
    into, pieces = [], []
    for numel, shard_numel, _, shard_offset, unsharded_offset in rows:
        if numel == 0:
            continue
        # As in `_pack_one`: first the ranks with full pieces, then the one with a short piece.
        full, rest = divmod(numel, shard_numel)
        chunks = gathered.view(-1, chunk_numel)[:, shard_offset : shard_offset + shard_numel]
        flat = unsharded.narrow(0, unsharded_offset, numel)
        into.append(flat[: full * shard_numel].view(full, shard_numel))
        pieces.append(chunks[:full])
        if rest:
            into.append(flat[full * shard_numel :])
            pieces.append(chunks[full, :rest])
    if into:
        torch._foreach_copy_(into, pieces)


@torch.no_grad()
def sum_chunks_reference(
    chunks: Sequence[Tensor], out: Tensor, divisor: float = 1.0, accumulate: bool = False
) -> None:
    """Computes `out = (out if accumulate else 0) + (chunks[0] + chunks[1] + ...) / divisor`.

    The sum runs from left to right and the division is a true one, so the result for float32 and
    two chunks is that of `(a + b) / 2` bit for bit.

    Args:
        chunks: contiguous tensors, one dtype, one number of elements. At most 1,024 on CUDA.
        out: contiguous, as many elements, any supported dtype; written. It may be one of `chunks`
            at exactly the same address, but must not overlap one otherwise. The schema does not
            show such an alias, so do not pass one inside `torch.compile`.
        divisor: the number by which the sum is divided, not 0.
        accumulate: add to what `out` holds.

    Streams:
        Runs on the current stream of the device of `out`.

    Capture:
        Safe: the compiled kernel allocates nothing; the reference allocates its float32 sum.
        Nothing is read back. The addresses of `chunks` are recorded.
    """
    total = chunks[0].view(-1).to(compute_dtype(chunks[0], out), copy=True)
    for chunk in chunks[1:]:
        total.add_(chunk.view(-1))
    divide_(total, divisor)
    into = out.data.view(-1)
    if accumulate:
        total.add_(into)
    into.copy_(total)


pack = declare(
    "pack(Tensor[] grads, Tensor(a!) slot, Tensor table, int chunk_numel, float divisor=1.0, bool "
    "accumulate=False)",
    pack_reference,
)
unpack = declare(
    "unpack(Tensor gathered, Tensor(a!) unsharded, Tensor table, int chunk_numel)",
    unpack_reference,
)
sum_chunks = declare(
    "sum_chunks(Tensor[] chunks, Tensor(a!) out, float divisor=1.0, bool accumulate=False)",
    sum_chunks_reference,
)
