"""Parameters without gradients in dtypes that are only carried, beside ordinary ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.errors import UnsupportedParameterError
from tests.support.muon import cut_like
from tests.support.parity import (
    BYTE_DTYPES,
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    assert_same_bits,
    train_squares,
)
from tests.support.ranks import on_ranks


class Quantised(nn.Module):
    """A layer with a frozen table and a short vector of another dtype, and a scale that trains."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.randint(-3, 4, (7, 5)).to(dtype)
        self.table = nn.Parameter(values, requires_grad=False)
        self.short = nn.Parameter(torch.arange(3).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.table.dtype is self.short.dtype
        return x @ (self.table.float() * self.scale).T + self.short.float().sum()


def train_beside(engine: Engine, dtype: torch.dtype, options: dict[str, Any]) -> Tensors:
    torch.manual_seed(0)
    model = nn.Sequential(Quantised(dtype), nn.Linear(7, 5), Quantised(dtype))
    engine.shard(*model, model, **options)
    assert isinstance(model[0].table, DTensor)
    assert model[0].table.dtype is dtype
    found = {name: value.float() for name, value in train_squares(engine, model, 5).items()}
    for module in (*model, model):
        module.reshard()
    state = model.state_dict()
    model.load_state_dict({name: value.clone() for name, value in state.items()})
    found |= {name: value.to_local().clone().float() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            local = param.to_local()
            found[f"{name} as bytes"] = local.contiguous().view(torch.uint8).float()
    return found


@pytest.mark.parametrize("dtype", BYTE_DTYPES, ids=str)
@on_ranks(2)
def test_parameters_of_other_dtypes_train_bit_for_bit_like_fsdp2(dtype: torch.dtype) -> None:
    for options in ({}, {"reshard_after_forward": False}):
        assert_same_bits(
            train_beside(SHARDGRAD, dtype, options), train_beside(FSDP2, dtype, options)
        )


@on_ranks(2)
def test_a_meta_model_with_other_dtypes_can_be_filled() -> None:
    torch.manual_seed(0)
    whole = Quantised(torch.int8)
    with torch.device("meta"):
        model = Quantised(torch.int8)
    SHARDGRAD.fully_shard(model).to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.to_local().copy_(cut_like(param, whole.get_parameter(name)).to_local())
    x = SHARDGRAD.inputs(0, 5)
    assert torch.equal(model(x), whole(x))


@on_ranks(2)
def test_float8_that_would_train_or_be_cast_is_refused() -> None:
    trains = nn.Linear(3, 3)
    trains.weight = nn.Parameter(torch.ones(3, 3).to(torch.float8_e4m3fn))
    with pytest.raises(
        UnsupportedParameterError, match=r"cannot reduce gradients of .* in torch\.float8_e4m3fn"
    ):
        SHARDGRAD.fully_shard(trains)
    trains.weight.requires_grad_(False)
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(UnsupportedParameterError, match="is gathered as bytes and never cast"):
        SHARDGRAD.fully_shard(trains, mp_policy=policy)
    SHARDGRAD.fully_shard(trains)
