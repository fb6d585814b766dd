"""What torch calls an `FSDPParamGroup`, for programs that gather by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad


@pytest.fixture
def model(one_rank: None) -> nn.Module:
    return shardgrad.fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))


def test_a_group_is_gathered_and_given_back_by_hand(model: nn.Module) -> None:
    expected = torch.nn.functional.linear(
        torch.ones(2, 4), model.weight.full_tensor(), model.bias.full_tensor()
    )
    group = model._get_fsdp_state()._fsdp_param_group
    assert not group.is_unsharded
    group.unshard()
    assert group.is_unsharded
    assert torch.equal(
        torch.nn.functional.linear(torch.ones(2, 4), model.weight, model.bias), expected
    )
    group.reshard()
    assert not group.is_unsharded
