"""`CPUOffloadPolicy`: on CPU ranks the host is the device, and everything is as under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

import shardgrad
from tests.support.parity import (
    SHARDGRAD,
    Engine,
    Tensors,
    assert_same_bits,
    same_bits_as_fsdp2,
    tower,
    train,
)
from tests.support.ranks import Ranks, on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train_offloaded(engine: Engine, options: dict[str, Any], **loop: Any) -> Tensors:
    # Without an accelerator there is nothing to pin for: FSDP2 fails then, here it is a no-op.
    policy = CPUOffloadPolicy(pin_memory=engine is SHARDGRAD)
    model = engine.shard_tower(tower(), offload_policy=policy, **options)
    assert all(param.device.type == "cpu" for param in model.parameters())
    return train(engine, model, **loop)


def load_piece_by_piece(engine: Engine) -> Tensors:
    """Fills a model on the meta device as a loader of large checkpoints does: one tensor after
    another.
    """
    whole = tower(seed=3).state_dict()
    with torch.device("meta"):
        model = tower()
    model = engine.shard_tower(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for name, param in dict(model.state_dict()).items():
        piece = distribute_tensor(whole[name], param.device_mesh, param.placements)
        model.load_state_dict({name: piece}, assign=True, strict=False)
    found = train(engine, model, steps=1)
    model.reshard()
    state = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    assert all(value.device.type == "cpu" for value in state.values())
    return found | {f"{name} at the end": value for name, value in state.items()}


@on_ranks(2)
def test_clipping_and_flat_optimizers_work_on_the_host() -> None:
    """The fused optimizer and norm find shards and states on the host."""

    def run(**options: Any) -> Tensors:
        model = SHARDGRAD.shard_tower(tower(), **options)
        optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            tokens, targets = SHARDGRAD.tokens(step)
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            shardgrad.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return SHARDGRAD.snapshot(model)

    assert_same_bits(run(offload_policy=CPUOffloadPolicy()), run())


@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ({}, {}),
        ({}, {"micro_batches": 2, "set_to_none": False}),
        ({"mp_policy": BF16}, {"micro_batches": 2, "sync_each": False}),
        ({"reshard_after_forward": False}, {"optimizer": "sgd"}),
    ],
    ids=["plain", "accumulating", "mixed precision", "kept whole"],
)
def test_training_with_shards_on_the_host_is_bit_for_bit_like_fsdp2(
    two_ranks: Ranks, options: dict[str, Any], loop: dict[str, Any]
) -> None:
    two_ranks.run(same_bits_as_fsdp2, train_offloaded, options, **loop)


def test_a_meta_model_filled_piece_by_piece_on_the_host_trains_like_fsdp2(two_ranks: Ranks) -> None:
    two_ranks.run(same_bits_as_fsdp2, load_piece_by_piece)
