"""Ranks that had different weights are told so, and those that were loaded or initialized later are
not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from shardgrad import fully_shard
from shardgrad.errors import RankDisagreementError
from tests.support.parity import hsdp_mesh
from tests.support.ranks import on_ranks

WIDTH = 6


def blocks(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    last = nn.Linear(3, 1)  # only rank 0 has a row of it
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3), last)


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def trains(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()


@on_ranks(2)
def test_values_that_all_differ_alike_are_told() -> None:
    """Twice as large, an even number of times: what an exclusive or would not see."""
    model = blocks(0)
    with torch.no_grad():
        model[1].weight.fill_(1.0 + dist.get_rank())
    with pytest.raises(RankDisagreementError, match=r"1\.weight"):
        trains(sharded(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
@on_ranks(2)
def test_one_value_that_differs_is_told_on_every_rank(name: str, dtype: torch.dtype) -> None:
    model = blocks(0).to(dtype)
    # The same values, in memory that is not aligned on one of the ranks.
    model[1].weight.data = torch.ones(WIDTH + 1, dtype=dtype)[dist.get_rank() :][:WIDTH]
    with torch.no_grad():
        if dist.get_rank() == 1:
            model.get_parameter(name).view(-1)[-1] += 1
    fully_shard(model[0], mesh=hsdp_mesh(2, 1))  # each mesh is compared
    fully_shard(model)
    with pytest.raises(RankDisagreementError) as caught:
        trains(model, dtype)
    text = str(caught.value)
    assert text.startswith("ranks had different weights when fully_shard sharded them\n")
    assert f"expected: rank 0: {name} had checksum" in text
    assert f"got:      rank 1: {name} had checksum" in text
    assert f"where:    rank {dist.get_rank()}\n" in text


@on_ranks(4)
def test_replicas_that_differ_are_told_on_every_rank() -> None:
    """Ranks 0 and 1 hold one replica, ranks 2 and 3 the other."""
    model = sharded(blocks(dist.get_rank() // 2), mesh=hsdp_mesh(2, 2))
    with pytest.raises(RankDisagreementError, match=r"rank [23]: 2\.weight had checksum"):
        trains(model)


# -- what is not compared


@on_ranks(2)
def test_shards_that_each_rank_initializes_may_differ() -> None:
    with torch.device("meta"):
        model = blocks(0)
    sharded(model).to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())  # as every rank initializes its shards
    for module in model:
        module.reset_parameters()
    trains(model)


@on_ranks(2)
def test_weights_that_one_rank_sends_after_sharding_are_not_compared() -> None:
    model = sharded(blocks(dist.get_rank()))
    full = blocks(0).state_dict() if dist.get_rank() == 0 else {}  # as it had them
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    trains(model)
    expected = blocks(0).state_dict()
    assert all(torch.equal(p.full_tensor(), expected[name]) for name, p in model.named_parameters())
