"""`CPUOffloadPolicy` where host and device differ: the same numbers, memory on the host, copies in
order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import shardgrad
from shardgrad.errors import CaptureError, ForeignParameterError
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, on_virtual_ranks
from tests.simulated.programs.towers import batch, sharded_tower
from tests.support.parity import token_loss

STEPS = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _train(
    policy: OffloadPolicy,
    replicas: int,
    micro_batches: int,
    sync_each: bool,
    options: dict[str, Any],
) -> list[torch.Tensor]:
    """Trains; returns the losses, and this rank's pieces and gradients of the last step."""
    model = sharded_tower(replicas, on_host=True, offload_policy=policy, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            model.set_requires_gradient_sync(sync_each or last)
            model.set_is_last_backward(last)
            loss = token_loss(model, batch(micro_batches * step + micro))
            loss.backward()
            found.append(loss.detach())
        shardgrad.clip_grad_norm_(model, 0.5)
        optimizer.step()
    offloaded = isinstance(policy, CPUOffloadPolicy)
    home = "cpu" if offloaded else NAME
    for param in model.parameters():
        assert param.device.type == param.grad.device.type == home
        assert all(t.device.type == home for t in optimizer.state[param].values() if t.ndim)
    local = [t.to_local() for param in model.parameters() for t in (param, param.grad)]
    return [tensor.detach().cpu() for tensor in (*found, *local)]


@pytest.mark.parametrize(
    ("world_size", "replicas", "micro_batches", "sync_each", "options", "pin_memory"),
    [
        (1, 1, 1, True, {}, False),
        (2, 1, 2, True, {}, True),
        (2, 1, 2, False, {"mp_policy": BF16}, False),
        (4, 2, 2, True, {"reshard_after_forward": False}, True),
    ],
    ids=["one rank", "accumulating", "reduced at the end", "replicas"],
)
def test_shards_on_the_host_train_bit_for_bit_like_shards_on_the_device(
    world_size: int,
    replicas: int,
    micro_batches: int,
    sync_each: bool,
    options: dict[str, Any],
    pin_memory: bool,
) -> None:
    loop = (replicas, micro_batches, sync_each, options)
    with checked():
        on_host = VirtualRanks(world_size).run(
            _train, CPUOffloadPolicy(pin_memory=pin_memory), *loop
        )
    on_device = VirtualRanks(world_size).run(_train, OffloadPolicy(), *loop)
    for ours, theirs in zip(on_host, on_device, strict=True):
        assert all(map(torch.equal, ours, theirs))


def _device_memory(policy: OffloadPolicy) -> int:
    """Returns the bytes of device memory that a trained model and its optimizer hold between
    steps.
    """
    model = sharded_tower(on_host=True, offload_policy=policy)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    token_loss(model, batch(0)).backward()
    optimizer.step()
    groups = [
        grads
        for module in model.modules()
        if (unit := module.__dict__.get("_shardgrad_unit"))
        for grads in unit.grad_groups
    ]
    held = [t for grads in groups for t in (grads.group.shard, grads.require_shard().flat)]
    held += [t for _, t in optimizer.buffers()]
    return sum(t.nbytes for t in held if t.device.type == NAME)


def test_no_shard_gradient_or_state_is_left_on_the_device() -> None:
    assert VirtualRanks(2).run(_device_memory, OffloadPolicy())[0] > 0
    assert VirtualRanks(2).run(_device_memory, CPUOffloadPolicy()) == [0, 0]


@on_virtual_ranks(2)
def test_what_the_policy_excludes_is_refused() -> None:
    model = sharded_tower(on_host=True, offload_policy=CPUOffloadPolicy())
    with pytest.raises(CaptureError, match="CPUOffloadPolicy and graphed_step exclude each other"):
        shardgrad.graphed_step(model)(lambda: None)
    with pytest.raises(
        ForeignParameterError, match="materialized on CPU when enabling CPU offloading"
    ):
        model.to(NAME)
