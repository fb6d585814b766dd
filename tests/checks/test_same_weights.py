"""Ranks that had different weights are told so, and those that were loaded or initialised later are
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from shardgrad import MixedPrecisionPolicy, fully_shard
from shardgrad.errors import RankDisagreementError
from tests.support.ranks import Ranks, on_ranks

WIDTH = 6


def blocks(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def trains(model: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()
    return True


def one_value_apart(which: Callable[[nn.Sequential], torch.Tensor], dtype: torch.dtype) -> str:
    model = blocks(0).to(dtype)
    with torch.no_grad():
        if dist.get_rank() == 1:
            which(model).view(-1)[-1] += 1
    sharded(model)
    with pytest.raises(RankDisagreementError) as caught:
        trains(model, dtype)
    return str(caught.value)


@on_ranks(2)
def test_values_that_all_differ_alike_are_told() -> None:
    """Twice as large, an even number of times: what an exclusive or would not see."""
    model = blocks(0)
    with torch.no_grad():
        model[1].weight.fill_(1.0 + dist.get_rank())
    with pytest.raises(RankDisagreementError, match=r"1\.weight"):
        trains(sharded(model))


def last_bias(model: nn.Sequential) -> torch.Tensor:
    return model[2].bias


def first_weight(model: nn.Sequential) -> torch.Tensor:
    return model[0].weight


def drifted_replicas() -> str:
    """Ranks 0 and 1 hold one replica, ranks 2 and 3 the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(blocks(dist.get_rank() // 2), mesh=mesh)
    with pytest.raises(RankDisagreementError) as caught:
        trains(model)
    return str(caught.value)


# -- what is not compared


def from_meta() -> bool:
    with torch.device("meta"):
        model = blocks(0)
    sharded(model).to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())  # as every rank initialises its shards
    for module in model:
        module.reset_parameters()
    return trains(model)


def loaded_from_rank_0() -> bool:
    model = sharded(blocks(dist.get_rank()))
    full = blocks(7).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    trains(model)
    expected = blocks(7).state_dict()
    return all(torch.equal(p.full_tensor(), expected[name]) for name, p in model.named_parameters())


def initialised_on_one_rank_after_sharding() -> bool:
    model = sharded(blocks(dist.get_rank()))
    with torch.no_grad():
        for param in model.parameters() if dist.get_rank() else ():
            param.to_local().fill_(0.5)
    return trains(model)


def broadcast_before_sharding() -> bool:
    """What the error says to type."""
    model = blocks(dist.get_rank())
    for tensor in model.state_dict().values():
        torch.distributed.broadcast(tensor, 0)
    return trains(sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("which", "name"), [(first_weight, "0.weight"), (last_bias, "2.bias")])
def test_one_value_that_differs_is_told_on_every_rank(
    two_ranks: Ranks, which: Callable[..., Any], name: str, dtype: torch.dtype
) -> None:
    for rank, text in enumerate(two_ranks.run(one_value_apart, which, dtype)):
        assert f"had different weights when fully_shard cut them: {name}\n" in text
        assert "2 different ones, on ranks 0 / 1" in text
        assert f"where:    rank {rank}, parameter {name}" in text


def test_replicas_that_differ_are_told_on_every_rank(four_ranks: Ranks) -> None:
    for text in four_ranks.run(drifted_replicas):
        assert "had different weights when fully_shard cut them: 2.weight and 3 more" in text


@pytest.mark.parametrize(
    "program",
    [
        from_meta,
        loaded_from_rank_0,
        initialised_on_one_rank_after_sharding,
        broadcast_before_sharding,
    ],
)
def test_weights_that_were_loaded_or_initialised_since_train(
    two_ranks: Ranks, program: Callable[[], bool]
) -> None:
    assert all(two_ranks.run(program))
