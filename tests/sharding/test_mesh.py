"""Meshes that are given and those that are not: which are taken, started, or refused."""

from __future__ import annotations

import gc
import re
import socket
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardgrad import fully_shard
from shardgrad.errors import MeshError
from shardgrad.sharding.mesh import DataParallelMesh, default_mesh
from tests.support.ranks import on_ranks


@pytest.fixture
def square(one_rank: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))


@pytest.mark.parametrize(("replicate", "shard"), [(1, 0), (None, 0), (None, 1)])
def test_axes_in_another_order_than_torchs_are_refused_with_what_they_are(
    square: DeviceMesh, replicate: int | None, shard: int
) -> None:
    info = SimpleNamespace(mesh=square, replicate_mesh_dim=replicate, shard_mesh_dim=shard)
    with pytest.raises(MeshError, match=f"replicate_mesh_dim={replicate}, shard_mesh_dim={shard}"):
        DataParallelMesh.of_info(info)


def test_axes_in_torchs_order_are_taken(square: DeviceMesh) -> None:
    info = SimpleNamespace(mesh=square, replicate_mesh_dim=0, shard_mesh_dim=1)
    assert DataParallelMesh.of_info(info).mesh is square


@pytest.mark.parametrize(("started", "named"), [("mine.py", "mine.py"), ("", "program.py")])
def test_a_program_without_a_launcher_is_told_how_to_start_it_with_one(
    started: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [started])
    with pytest.raises(MeshError, match=re.escape(f"--nproc-per-node=2 {named}   (")):
        default_mesh()


def test_without_a_process_group_the_launchers_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    try:
        assert default_mesh().shape == (1,)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_units_share_one_mesh_over_all_ranks_and_each_world_has_another() -> None:
    meshes = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            meshes.append(default_mesh())
            assert default_mesh() is meshes[-1]
            assert meshes[-1].get_group() is dist.group.WORLD
        finally:
            dist.destroy_process_group()
    assert meshes[0] is not meshes[1]


@on_ranks(4)
def test_a_mesh_makes_its_process_groups_once_and_waits_for_no_other_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    dims = SimpleNamespace(shard_names=(), replicate_names=["inner"])
    # Groups of one are made on two ranks only; other groups come after them.
    makes = [partial(DataParallelMesh.of_named_axes, mesh, dims)][dist.get_rank() // 2 :]
    makes += [partial(DataParallelMesh.of(default_mesh()).subdivide, 2)]
    # One stage of a pipeline makes a group, the other one does not.
    grid = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "outer", "inner"))
    stage = DataParallelMesh.of(grid["outer", "inner"])
    makes += [stage.over_both_axes][dist.get_rank() // 2 :]
    for make in [*makes, DataParallelMesh.of(mesh).over_both_axes]:
        assert make().shard_group is make().shard_group


@pytest.mark.usefixtures("one_rank")
def test_the_mesh_over_all_ranks_does_not_outlive_its_units() -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
    meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    (mesh,) = map(weakref.ref, meshes)
    meshes.clear()
    del model
    gc.collect()
    assert mesh() is None
