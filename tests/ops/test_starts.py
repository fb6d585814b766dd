"""The ops give the same bits wherever in memory their tensors begin, and touch nothing beside
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardgrad import ops
from tests.support.segments import (
    UNTOUCHED,
    Segment,
    assert_same_bits,
    needs_library,
    run_adam,
    run_norm,
    run_sgd,
)

pytestmark = needs_library
OP = torch.ops.shardgrad
OFFSETS = (1, 2, 3, 4, 8)  # elements: of four bytes, 8 and 4 begin at a multiple of 16 bytes

Move = Callable[[Tensor], Tensor]


def moved(offset: int) -> Move:
    """Returns a copy that begins so many elements behind where an allocation does, and ends where
    it ends.
    """

    def move(tensor: Tensor) -> Tensor:
        storage = torch.full((offset + tensor.numel(),), UNTOUCHED).to(tensor.dtype)
        storage[offset:] = tensor.reshape(-1)
        return storage[offset:]

    return move


def same_beside(tensor: Tensor) -> bool:
    """Whether what lies before a moved tensor is as it was."""
    before = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), 0, (tensor.storage_offset(),)
    )
    return bool((before == torch.tensor(UNTOUCHED).to(tensor.dtype)).all())


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("which", ["gradients", "slot", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_pack_and_unpack_do_not_depend_on_where_memory_begins(
    dtype: torch.dtype, which: str, offset: int
) -> None:
    ranks, numel, shard = 2, 9001, 4504
    table = torch.tensor(
        [[numel, shard, shard, 0, 0], [0, 0, 0, shard, numel], [40, 20, 24, shard, numel]]
    )
    chunk_numel = shard + 24
    grads = [torch.randn(numel).to(dtype), torch.empty(0, dtype=dtype), torch.randn(40).to(dtype)]
    slots, wholes = [], []
    for of_grads, of_slot in (
        (0, 0),
        (offset * (which != "slot"), offset * (which != "gradients")),
    ):
        slot = moved(of_slot)(torch.full((ranks * chunk_numel,), UNTOUCHED))
        for accumulate in (False, True):
            OP.pack(
                [moved(of_grads)(grad) for grad in grads], slot, table, chunk_numel, 3.0, accumulate
            )
        whole = moved(of_grads)(torch.full((numel + 41,), UNTOUCHED).to(dtype))
        OP.unpack(slot, whole, table, chunk_numel)
        assert same_beside(slot)
        assert same_beside(whole)
        slots.append(slot)
        wholes.append(whole)
    assert_same_bits(*slots)
    assert_same_bits(*wholes)
    assert wholes[1][-1] == UNTOUCHED


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("which", ["first", "second", "out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sums_do_not_depend_on_where_memory_begins(
    dtype: torch.dtype, which: str, offset: int
) -> None:
    for numel in (1, 7, 4099):
        tensors = [torch.randn(numel).to(dtype), torch.randn(numel).to(dtype), torch.randn(numel)]
        outs = []
        for by in (0, offset):
            names = ("first", "second", "out")
            *chunks, out = (
                moved(by * (name == which))(t) for name, t in zip(names, tensors, strict=True)
            )
            OP.sum_chunks(chunks, out, 3.0, True)
            assert same_beside(out)
            outs.append(out)
        assert_same_bits(*outs)


def whole_segment(offset: int, column: str) -> Segment:
    """Returns rows that lie side by side from the first element on, one of them empty, in moved
    tensors.
    """
    sizes = (4096, 0, 511, 2049)
    s = Segment.of(sizes, param=torch.bfloat16, grad=torch.bfloat16, master=torch.float32)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = tuple(
        (at, at, at, n, i, i + 1) for i, (at, n) in enumerate(zip(starts, sizes, strict=True))
    )
    rows, tiles = ops.segment_rows(pieces)
    flat = {
        name: getattr(s, name)[: sum(sizes)].clone()
        for name in ("param", "grad", "first", "second", "master")
    }
    flat["master"] = flat["param"].float()
    flat["second"] = flat["second"].abs()
    names = flat if column == "all" else (column,)
    flat.update({name: moved(offset)(flat[name]) for name in names})
    return replace(s, **flat, pieces=pieces, rows=rows, tiles=tiles)


@pytest.mark.parametrize("column", ["param", "grad", "first", "master", "all"])
def test_updates_and_norms_do_not_depend_on_where_memory_begins(column: str) -> None:
    for offset in OFFSETS:
        near, far = whole_segment(0, column), whole_segment(offset, column)
        for s in (near, far):
            run_adam("compiled", s)
            run_sgd("compiled", s)
        for name, tensor in near.written().items():
            assert_same_bits(far.written()[name], tensor, name)
        for name in ("param", "first", "second", "master"):
            assert same_beside(getattr(far, name))
        for norm_type in (2.0, math.inf):
            assert run_norm("compiled", far, norm_type) == run_norm("compiled", near, norm_type)
