"""Parameters cut along other dims, or over other meshes, than the default: the same bits as under
FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

import shardgrad
from tests.support.muon import cut_like
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    closely_as_under_fsdp2,
    last_dim,
    stack,
    train_squares,
)
from tests.support.ranks import on_ranks


def largest_dim(param: nn.Parameter) -> Shard:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def sometimes(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 and param.shape[0] < param.shape[1] else None


class Cube(nn.Module):
    """A parameter with three dims, one with two, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(3, 8, 4) / 4)
        self.out = nn.Linear(8, 4)
        self.idle = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.einsum("bi,kji->bj", x, self.cube).tanh())


def wide() -> nn.Module:
    return stack(8, 16, 8, 4)


def cube() -> nn.Module:
    torch.manual_seed(0)
    return Cube()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.0) for _ in range(2)
    )
    return nn.Sequential(*layers, nn.Linear(8, 4))


@pytest.mark.parametrize("build", [wide, cube, transformer])
@pytest.mark.parametrize("choose", [largest_dim, last_dim, sometimes])
@on_ranks(2)
@as_under_fsdp2
def test_any_dim_trains_bit_for_bit_like_fsdp2(
    engine: Engine,
    build: Callable[[], nn.Module],
    choose: Callable[[nn.Parameter], Shard | None],
) -> Tensors:
    model = build()
    for child in model.children():
        if isinstance(child, nn.Linear | nn.TransformerEncoderLayer):
            engine.fully_shard(child, shard_placement_fn=choose)
    engine.fully_shard(model, shard_placement_fn=choose)
    width = next(p.shape[-1] for p in model.parameters() if p.ndim > 1)
    return train_squares(engine, model, width, steps=2)


def faces_of(engine: Engine) -> dict[str, Any]:
    model = cube()
    originals = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine.fully_shard(model, shard_placement_fn=last_dim)
    seen: list[bool] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.extend(param.is_contiguous() for param in module.parameters())

    model.register_forward_pre_hook(look)
    model.register_forward_hook(look)
    model.out.register_forward_pre_hook(look)
    model(engine.inputs(0, 4)).sum().backward()
    assert seen == [True] * (2 * 4 + 2)
    faces: dict[str, Any] = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), originals[name])
        assert param.to_local().is_contiguous()
        assert param.grad is None or param.grad.to_local().is_contiguous()
        faces[name] = (param.placements, param.shape, param.stride(), param.to_local().shape)
    return faces


@on_ranks(2)
def test_faces_are_those_of_fsdp2_and_contiguous() -> None:
    ours = faces_of(SHARDGRAD)
    assert ours == faces_of(FSDP2)
    assert ours["cube"][0] == (Shard(2),)
    assert ours["out.bias"][0] == (Shard(0),)


# -- our own optimizers, clipping and state


@on_ranks(2)
def test_replacements_cut_along_another_dim_are_taken_over() -> None:
    """Loads replacements into a model cut along the last dim, and goes on with them."""
    donor, model = cube(), cube()
    with torch.no_grad():
        for param in donor.parameters():
            param.mul_(3).add_(1)
    shardgrad.fully_shard(model, shard_placement_fn=last_dim)
    values = donor.state_dict()
    state = {name: cut_like(param, values[name]) for name, param in model.named_parameters()}
    model.load_state_dict(state, assign=True)
    x = SHARDGRAD.inputs(0, 4)
    assert torch.equal(model(x), donor(x))


# -- meshes of their own


@cache
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))


class Mixture(nn.Module):
    """A dense layer, and an expert of which every other rank holds another one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(F.gelu(self.dense(x)))


@pytest.mark.parametrize("alone", [False, True], ids=["nested", "one_unit"])
@on_ranks(4)
@closely_as_under_fsdp2
def test_experts_on_a_mesh_of_their_own_train_like_under_fsdp2(
    engine: Engine, *, alone: bool
) -> Tensors:
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(), Mixture())
    with torch.no_grad():
        for mixture in model:
            mixture.expert.weight.mul_(1 + grid().get_local_rank("ep"))
    experts = {p for mixture in model for p in mixture.expert.parameters()}
    wide_mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    info = FSDPMeshInfo(grid()["efsdp"], shard_mesh_dim=0)

    def choose(param: nn.Parameter) -> Any:
        if param not in experts:
            return None
        return ShardPlacementResult(Shard(1) if param.ndim > 1 else Shard(0), info)

    units = (model,) if alone else (*model, model)
    engine.shard(*units, mesh=wide_mesh, shard_placement_fn=choose)
    return train_squares(engine, model, 8, steps=2)
