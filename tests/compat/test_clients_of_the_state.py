"""What DINOv3's trainer, NeMo Automodel, LLaMA-Factory, verl and AReaL ask of a sharded module."""

from __future__ import annotations

import importlib
from abc import ABC
from typing import Any, Generic, Protocol, TypeVar
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.tensor import DTensor

import shardgrad
from shardgrad.engine.unit import unit_of
from tests.support.ranks import on_ranks

T = TypeVar("T")


class Slots:
    __slots__ = ()


class Forward(Protocol):
    def forward(self, input: torch.Tensor) -> torch.Tensor: ...


class FromABC(ABC, nn.Linear): ...


class FromGeneric(Generic[T], nn.Linear): ...


class FromSlots(Slots, ABC, nn.Linear): ...


class FromProtocol(Forward, nn.Linear):
    forward = nn.Linear.forward


class FromChild(FromABC): ...


class WithUnshard(ABC, nn.Linear):
    def unshard(self) -> str:
        return "of the program"


class OfABC(ABC, torch.distributed.fsdp.FSDPModule): ...  # type: ignore[misc]


CLASSES = [FromABC, FromGeneric, FromSlots, FromProtocol, FromChild, WithUnshard]


@pytest.mark.parametrize("replaced", [False, True], ids=["", "replaced"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@on_ranks(2)
def test_a_model_with_a_base_without_a_dict_is_sharded(
    cls: type[nn.Linear], replaced: bool
) -> None:
    torch.manual_seed(0)
    model, plain = cls(4, 3), nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    # While verl and AReaL shard, torch's name is one of a class that derives from ABC.
    place = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    base = OfABC if replaced else place.FSDPModule
    with mock.patch.object(place, "FSDPModule", base):
        shardgrad.fully_shard(model, offload_policy=None)
    for each in (model, plain):
        each(torch.ones(2, 4)).square().sum().backward()
    grad = model.weight.grad
    assert isinstance(grad, DTensor)
    torch.testing.assert_close(grad.full_tensor(), plain.weight.grad)
    assert isinstance(model, cls)
    assert isinstance(model, shardgrad.FSDPModule)
    assert type(model).__mro__[2] is cls
    handle: Any = model.unshard()
    assert handle != "of the program"
    assert not isinstance(model.weight, DTensor)


@on_ranks(2)
def test_dinov3_makes_a_root_reshard_after_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardgrad.fully_shard(model[0])
    shardgrad.fully_shard(model)
    state = torch.distributed.fsdp.fully_shard.state(model)
    kept = state._fsdp_param_group.post_forward_mesh_info
    state._lazy_init()
    state._fsdp_param_group.post_forward_mesh_info = kept
    assert kept is not None
    model(torch.ones(2, 4))
    assert all(isinstance(param, DTensor) for param in model.parameters())
    state._fsdp_param_group.post_forward_mesh_info = None
    model(torch.ones(2, 4))
    assert not isinstance(model[1].weight, DTensor)


@on_ranks(2)
def test_verl_changes_resharding_of_every_unit_by_torchs_own_function() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardgrad.fully_shard(model[0])
    shardgrad.fully_shard(model)
    for reshard_after_forward in (False, True):
        for module in (model, model[0]):
            group = torch.distributed.fsdp.fully_shard.state(module)._fsdp_param_group
            group.post_forward_mesh_info = _get_post_forward_mesh_info(
                reshard_after_forward, group.mesh_info
            )
            assert (group.post_forward_mesh_info is not None) == reshard_after_forward
        model(torch.ones(2, 4))
        sharded = {isinstance(param, DTensor) for param in model.parameters()}
        assert sharded == {reshard_after_forward}


@on_ranks(2)
def test_tiles_keep_their_unit_unsharded_by_the_flag_of_its_group() -> None:
    model = shardgrad.fully_shard(nn.Linear(4, 4))
    group = torch.distributed.fsdp.fully_shard.state(model)._fsdp_param_group
    for flag in (False, True):
        group.reshard_after_backward = flag
        model(torch.ones(2, 4)).sum().backward()
        unit = unit_of(model)
        assert unit is not None
        assert (unit.groups[0].is_filled, group.reshard_after_backward) == (not flag, flag)
