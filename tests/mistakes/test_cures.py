"""What errors say to type works."""

from __future__ import annotations

import copy

import torch
from torch import nn

from shardgrad import fully_shard
from tests.mistakes.models import backward
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_a_module_that_is_sharded_before_those_that_share_it_trains() -> None:
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
    assert all(torch.allclose(ours.grad.full_tensor(), theirs.grad) for ours, theirs in pairs)
