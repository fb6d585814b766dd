"""Weights written while units are unsharded, as EMA and hand-written optimizers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.parity import SHARDGRAD, hsdp_mesh, stack
from tests.support.ranks import on_ranks


@pytest.mark.parametrize(
    "options",
    [{"reshard_after_forward": False}, {"zero_stage": 2}, {"zero_stage": "hfsdp"}],
    ids=str,
)
@on_ranks(2)
@torch.no_grad()
def test_a_write_through_data_is_used_after_reshard(options: dict[str, Any]) -> None:
    model = stack(5, 7, 3)
    if options.get("zero_stage") == "hfsdp":  # keeps what other machines have sent
        options = {**options, "mesh": hsdp_mesh(2, 1)}
    SHARDGRAD.shard(model[0], model, **options)
    params = list(model.parameters())
    assert model(torch.ones(2, 5)).any()
    for param in params:
        param.data.mul_(0)
    for module in (model[0], model):
        module.reshard()
    assert not model(torch.ones(2, 5)).any()
    if "reshard_after_forward" in options:  # a state dict reshards, too
        for value in model.state_dict().values():
            value.data.fill_(1)
        assert model(torch.ones(2, 5)).any()
