"""Whole training runs whose sums FSDP2 rounds otherwise. Kept programs compare bits where it does
not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support.parity import (
    FSDP2_GATHERED,
    GATHERED,
    tower,
    train,
)
from tests.support.ranks import Ranks

BF16_REDUCED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
FP32_REDUCED_IN_BF16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)


def train_and_compare_distance(shard: dict[str, Any], fraction: float, **options: Any) -> None:
    """Trains under both engines; they may differ by `fraction` of how far training moved a
    parameter.
    """
    start = {name: param.detach() for name, param in tower().named_parameters()}
    ours, theirs = (
        train(engine, engine.shard_tower(tower(), **shard), optimizer="sgd", **options)
        for engine in (GATHERED, FSDP2_GATHERED)
    )
    assert list(ours) == list(theirs)
    for name, before in start.items():
        moved = (theirs[name] - before).abs().max()
        off = (ours[name] - theirs[name]).abs().max()
        assert moved > 0, name
        assert off <= fraction * moved, f"{name} is off by {off}, after moving by {moved}"


@pytest.mark.parametrize(
    ("micro_batches", "sync_each"),
    [(1, True), (4, True), (4, False)],
    ids=["one_batch", "sync_each_of_4", "sync_last_of_4"],
)
@pytest.mark.parametrize("policy", [BF16_REDUCED, FP32_REDUCED_IN_BF16], ids=["bf16", "fp32"])
def test_bf16_reduction_stays_within_bf16_rounding_of_fsdp2(
    two_ranks: Ranks, policy: MixedPrecisionPolicy, micro_batches: int, sync_each: bool
) -> None:
    # FSDP2 rounds the sum of two bf16 gradients to bf16 once more (2^-9 relative), we keep fp32; a
    # few steps of momentum and re-rounded weights multiply that, hence 2^-5 of the way.
    two_ranks.run(
        train_and_compare_distance,
        {"mp_policy": policy},
        2**-5,
        micro_batches=micro_batches,
        sync_each=sync_each,
    )


def test_fp16_reduction_stays_within_fp16_rounding_of_fsdp2(two_ranks: Ranks) -> None:
    # As for bf16, with 2^-11 a rounding.
    two_ranks.run(train_and_compare_distance, {"mp_policy": FP16}, 2**-6)


def test_fp32_on_four_ranks_differs_from_fsdp2_only_by_the_order_of_sums(four_ranks: Ranks) -> None:
    # The head's shards have odd sizes, so gloo adds some elements with those of another rank. Four
    # terms in another order differ by a few times 2^-24, relative to the largest term.
    four_ranks.run(train_and_compare_distance, {}, 1e-4)
