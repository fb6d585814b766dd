"""`CPUOffloadPolicy` where host and device differ: what is in whose memory.

Kept programs show the numbers and the order of copies (`test_matrix.py`, "shards on the host").
"""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import shardgrad
from shardgrad.engine.unit import units_under
from shardgrad.errors import CaptureError, ForeignParameterError
from tests.simulated.accelerator.device import NAME
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, on_virtual_ranks
from tests.simulated.programs.towers import batch, sharded_tower
from tests.support.parity import token_loss


def _device_memory(policy: OffloadPolicy) -> int:
    """Returns the bytes of device memory that a trained model and its optimizer hold between
    steps.
    """
    model = sharded_tower(on_host=True, offload_policy=policy)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    token_loss(model, batch(0)).backward()
    optimizer.step()
    groups = [grads for unit in units_under(model) for grads in unit.grad_groups]
    held = [t for grads in groups for t in (grads.group.shard, grads.require_shard().flat)]
    held += [t for _, t in optimizer.buffers()]
    return sum(t.nbytes for t in held if t.device.type == NAME)


def test_no_shard_gradient_or_state_is_left_on_the_device() -> None:
    assert VirtualRanks(2).run(_device_memory, OffloadPolicy())[0] > 0
    assert VirtualRanks(2).run(_device_memory, CPUOffloadPolicy()) == [0, 0]


@on_virtual_ranks(2)
def test_what_the_policy_excludes_is_refused() -> None:
    model = sharded_tower(on_host=True, offload_policy=CPUOffloadPolicy())
    with pytest.raises(CaptureError, match="graphed_step does not support CPUOffloadPolicy"):
        shardgrad.graphed_step(model)(lambda: None)
    with pytest.raises(
        ForeignParameterError, match="materialized on CPU when enabling CPU offloading"
    ):
        model.to(NAME)
