"""Bytes that a step copies around its collectives, counted where they are written: no more than
FSDP2's.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardgrad.sharding import zero_copy
from shardgrad.sharding.layout import ALIGNMENT_NBYTES, TAG_NUMEL
from tests.support.parity import FSDP2, SHARDGRAD, Engine, stack
from tests.support.ranks import Ranks, on_ranks
from tests.support.stand_ins.symmetric_memory import symmetric_memory_on_the_cpu

GATHER_IN, GATHER_OUT, REDUCE_IN = "into all-gathers", "out of all-gathers", "into reduce-scatters"
TAGS = "tags of messages"


class Copies(TorchDispatchMode):
    """Counts what the packing operations of both engines write, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removesuffix(".default")
        if name == "shardgrad::unpack":
            self.written[GATHER_OUT] += int(args[2][:, 0].sum()) * args[1].itemsize
        elif name == "shardgrad::pack":
            self.written[REDUCE_IN] += args[1].nbytes
        elif name == "aten::copy_" and args[0].shape[-1:] == (TAG_NUMEL,):
            self.written[TAGS] += args[0].nbytes
        elif name == "aten::copy_":
            self.written[GATHER_IN] += args[0].nbytes
        elif name == "fsdp::all_gather_copy_in":
            self.written[GATHER_IN] += sum(each.nbytes for each in args[0])
        elif name == "fsdp::split_with_sizes_copy":
            self.written[GATHER_OUT] += args[0].nbytes
        elif name.startswith("fsdp::chunk_cat"):  # from torch 2.15 on with a suffix
            self.written[REDUCE_IN] += (kwargs["out"] if "out" in kwargs else args[-1]).nbytes
        return func(*args, **kwargs)


def copies_of_a_step(engine: Engine, sizes: tuple[int, ...], **options: Any) -> Counter[str]:
    model = engine.shard_stack(stack(*sizes), **options)
    for step in range(2):
        with Copies() as copies:
            model(engine.inputs(step, sizes[0])).sum().backward()
    return copies.written


SIZES = (128, 256, 192, 64)


def both(threshold: int) -> tuple[Counter[str], Counter[str]]:
    """Returns what a step copies here and under FSDP2, if parameters travel by themselves from so
    many bytes on.
    """
    with patch.object(zero_copy, "ZERO_COPY_NBYTES", threshold):
        ours, theirs = (copies_of_a_step(engine, SIZES) for engine in (SHARDGRAD, FSDP2))
    return ours, theirs


def test_a_step_copies_no_more_bytes_than_fsdp2(two_ranks: Ranks) -> None:
    ours, theirs = two_ranks.run(both, zero_copy.ZERO_COPY_NBYTES)[0]
    assert theirs[GATHER_OUT] > 0 < theirs[REDUCE_IN]
    # Between two ranks over gloo the shard is put beside what comes. NCCL sends the shard itself.
    assert ours[GATHER_IN] <= theirs[GATHER_IN]
    # At most two all-gathers of a unit, and a reduction, whose chunks for both ranks have one each.
    assert 0 < ours[TAGS] <= TAG_NUMEL * 4 * 4 * (len(SIZES) - 1)
    assert ours[GATHER_OUT] <= theirs[GATHER_OUT]
    # Flags and label, one line for each rank and unit.
    tails = 2 * ALIGNMENT_NBYTES * (len(SIZES) - 1)
    assert ours[REDUCE_IN] - tails <= theirs[REDUCE_IN]
    assert ours.total() <= theirs.total()


def test_a_direct_parameter_is_copied_neither_out_of_an_all_gather_nor_into_a_reduce_scatter(
    two_ranks: Ranks,
) -> None:
    ours, theirs = two_ranks.run(both, 2**12)[0]
    biases = sum(SIZES[1:]) * torch.float32.itemsize
    # The tail and what fills up a bias, for each rank and unit.
    lines = 4 * ALIGNMENT_NBYTES * (len(SIZES) - 1)
    assert ours[REDUCE_IN] <= biases + lines
    assert ours[GATHER_OUT] <= 2 * biases + lines  # in forward and in backward
    assert ours[GATHER_IN] <= theirs[GATHER_IN]


@on_ranks(2)
def test_what_other_ranks_have_is_copied_once_into_its_place() -> None:
    with symmetric_memory_on_the_cpu():
        ours = copies_of_a_step(SHARDGRAD, SIZES, comm="symmetric_memory")
    numels = [(columns + 1) * rows for columns, rows in pairwise(SIZES)]
    # In forward and in backward, where the last unit is still there: half into a window, and all
    # into its place.
    least = 3 * (2 * sum(numels) - numels[-1]) // 2 * torch.float32.itemsize
    assert least <= ours[GATHER_IN] <= least + 2 * 5 * ALIGNMENT_NBYTES
    assert ours[GATHER_OUT] == 0
