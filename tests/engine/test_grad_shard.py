"""None keeps its meaning: a parameter that no rank uses has no gradient."""

from __future__ import annotations

import pytest
import torch

from tests.support.parity import (
    SHARDGRAD,
    Half,
)
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("switch", [None, False, True])
@on_ranks(2)
def test_a_parameter_no_rank_uses_keeps_none_and_does_not_decay(switch: bool | None) -> None:
    """Whatever `set_reduce_scatter_unused_params` says: FSDP2 makes zeros of None with it."""
    torch.manual_seed(0)
    model = Half()
    before = model.unused.weight.detach().clone()
    SHARDGRAD.fully_shard(model)
    if switch is not None:
        model.set_reduce_scatter_unused_params(switch)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(2):
        SHARDGRAD.loss(model, step, 5).backward()
        assert model.unused.weight.grad is None
        assert model.unused.bias.grad is None
        assert model.used.weight.grad is not None
        optim.step()
        optim.zero_grad()
    assert torch.equal(model.unused.weight.full_tensor(), before)
    assert model.unused.weight not in optim.state
