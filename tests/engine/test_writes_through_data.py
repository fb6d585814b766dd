"""Weights written while units are unsharded, as EMA and hand-written optimizers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardgrad
from tests.support.parity import SHARDGRAD, hsdp_mesh, stack
from tests.support.ranks import Ranks

WAYS_TO_STAY_UNSHARDED: list[dict[str, Any]] = [{"reshard_after_forward": False}, {"zero_stage": 2}]


def in_place(param: Tensor) -> None:
    param.mul_(0)


def through_data(param: Tensor) -> None:
    param.data.mul_(0)


def through_the_local_tensor(param: Tensor) -> None:
    param.to_local().mul_(0)


@torch.no_grad()
def is_used(write: Callable[[Tensor], None], reshards: bool, options: dict[str, Any]) -> None:
    model = stack(5, 7, 3)
    if options.get("zero_stage") == "hfsdp":  # keeps what other machines have sent
        options = {**options, "mesh": hsdp_mesh(2, 1)}
    for module in (model[0], model):
        SHARDGRAD.fully_shard(module, **options)
    params = list(model.parameters())
    assert model(torch.ones(2, 5)).any()
    for param in params:
        write(param)
    for module in model.modules() if reshards else ():
        if isinstance(module, shardgrad.FSDPModule):
            module.reshard()
    assert not model(torch.ones(2, 5)).any()


@pytest.mark.parametrize("options", WAYS_TO_STAY_UNSHARDED, ids=["whole", "stage_2"])
@pytest.mark.parametrize("write", [in_place, through_the_local_tensor])
def test_an_in_place_operation_on_shards_is_used_by_the_next_forward(
    two_ranks: Ranks, write: Callable[[Tensor], None], options: dict[str, Any]
) -> None:
    two_ranks.run(is_used, write, False, options)


@pytest.mark.parametrize("options", [*WAYS_TO_STAY_UNSHARDED, {"zero_stage": "hfsdp"}], ids=str)
def test_a_write_through_data_is_used_after_reshard(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    two_ranks.run(is_used, through_data, True, options)
