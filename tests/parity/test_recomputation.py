"""Activation checkpointing inside, outside and across units."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.parity.programs import (
    Block,
    Engine,
    Tensors,
    Tower,
    close_to_unsharded,
    same_bits_as_fsdp2,
    tower,
    train,
)
from tests.ranks import Ranks


class Recomputed(nn.Module):
    """Calls another module under activation checkpointing."""

    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.inner, *args, use_reentrant=self.use_reentrant)


def recomputing_tower(engine: Engine, placing: str, use_reentrant: bool) -> Tower:
    """Builds a tower whose blocks are recomputed.

    `inside`: the unit contains the checkpoint. `outside`: the checkpoint contains the unit. `across`: one
    checkpoint contains all units.
    """
    model = tower()
    for i in range(len(model.layers)):
        if placing == "inside":
            model.layers[i] = Recomputed(model.layers[i], use_reentrant)
            engine.fully_shard(model.layers[i])
        else:
            engine.fully_shard(model.layers[i])
    if placing == "outside":
        for i in range(len(model.layers)):
            model.layers[i] = Recomputed(model.layers[i], use_reentrant)
    if placing == "across":
        model.layers = nn.ModuleList([Recomputed(nn.Sequential(*model.layers), use_reentrant)])
    return engine.fully_shard(model)


def train_recomputing(engine: Engine, placing: str, use_reentrant: bool, **options: object) -> Tensors:
    return train(engine, recomputing_tower(engine, placing, use_reentrant), **options)


class CountingBlock(Block):
    """Counts its forwards, and the dtype it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return super().forward(x)


def dtypes_seen_in_recomputation(engine: Engine) -> Tensors:
    model = tower(depth=1)
    torch.manual_seed(1)
    block = CountingBlock()
    model.layers[0] = block
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    engine.fully_shard(block, mp_policy=policy)
    model.layers[0] = Recomputed(block, use_reentrant=False)
    engine.fully_shard(model)
    history = train(engine, model, steps=1)
    assert block.seen == [torch.bfloat16] * 2, block.seen
    return history


PLACINGS = pytest.mark.parametrize("placing", ["inside", "outside", "across"])
REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])


@PLACINGS
@REENTRANT
def test_recomputed_blocks_equal_an_unsharded_run(
    two_ranks: Ranks, placing: str, use_reentrant: bool
) -> None:
    two_ranks.run(close_to_unsharded, train_recomputing, placing, use_reentrant)


@PLACINGS
def test_recomputed_blocks_train_bit_for_bit_like_fsdp2(two_ranks: Ranks, placing: str) -> None:
    two_ranks.run(same_bits_as_fsdp2, train_recomputing, placing, False)


@REENTRANT
def test_recomputed_blocks_accumulate_like_an_unsharded_run(two_ranks: Ranks, use_reentrant: bool) -> None:
    two_ranks.run(
        close_to_unsharded, train_recomputing, "outside", use_reentrant, micro_batches=3, sync_each=False
    )


def test_recomputation_casts_its_inputs_as_forward_did(two_ranks: Ranks) -> None:
    two_ranks.run(same_bits_as_fsdp2, dtypes_seen_in_recomputation)
