"""What errors say to type works."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardgrad import fully_shard
from tests.mistakes.models import backward, batch, sharded
from tests.support.ranks import Ranks


def a_cast_optimizer() -> bool:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    model.bfloat16()
    before = [param.full_tensor() for param in model.parameters()]
    model(batch().bfloat16()).square().mean().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    return not any(map(torch.equal, before, (param.full_tensor() for param in model.parameters())))


def a_shared_module_first() -> bool:
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    blocks = [nn.Sequential(nn.Linear(8, 8), shared) for _ in range(2)]
    model = nn.Sequential(*blocks)
    whole = copy.deepcopy(model)
    for unit in (shared, *blocks, model):
        fully_shard(unit)
    backward(model)
    backward(whole)
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return all(torch.allclose(ours.grad.full_tensor(), theirs.grad) for ours, theirs in pairs)


@pytest.mark.parametrize(
    "program",
    [a_cast_optimizer, a_shared_module_first],
)
def test_what_an_error_says_to_type_works(two_ranks: Ranks, program: Callable[[], bool]) -> None:
    assert all(two_ranks.run(program))
