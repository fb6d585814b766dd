"""Checkpoints of several ranks: cut one way and loaded another, by either engine, agreed upon by
all.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardgrad
from shardgrad import checkpoint
from shardgrad.errors import CheckpointError
from tests.support.parity import (
    SHARDGRAD,
    Tensors,
    assert_same_bits,
    hsdp_mesh,
    tower,
)
from tests.support.ranks import Ranks, on_ranks
from tests.support.two_engines import ENGINES, build, take_steps, whole

MIB = 2**20


def nested(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    saved = get_state_dict(model, optim)
    return {
        "model": saved[0],
        "optim": saved[1],
        f"rank_{dist.get_rank()}": {"own": dist.get_rank()},
    }


def save(engine: str, folder: str, replicas: int) -> Tensors:
    """Trains and saves, each engine by the function that its users have."""
    model, optim = build(ENGINES[engine], 0, replicas)
    take_steps(ENGINES[engine], model, optim)
    if engine == "shardgrad":
        checkpoint.save(nested(model, optim), folder)
    else:
        dcp.save(nested(model, optim), checkpoint_id=folder)
    return whole(model, optim)


def load(engine: str, folder: str, replicas: int, right: Tensors) -> None:
    model, optim = build(ENGINES[engine], 1, replicas)
    state = nested(model, optim)
    if engine == "shardgrad":
        state = checkpoint.load(state, folder, optional=("rank_*",))
        assert state[f"rank_{dist.get_rank()}"]["own"] == dist.get_rank()
    else:
        del state[f"rank_{dist.get_rank()}"]  # torch's function has no optional parts
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert_same_bits(whole(model, optim), right)


@pytest.mark.parametrize(
    ("source", "writers", "write_replicas", "target", "readers", "read_replicas"),
    [
        ("shardgrad", 2, 1, "shardgrad", 2, 1),
        ("shardgrad", 2, 1, "fsdp2", 4, 2),
        ("shardgrad", 4, 2, "fsdp2", 4, 1),
        ("fsdp2", 4, 2, "shardgrad", 2, 1),
        ("fsdp2", 4, 1, "shardgrad", 4, 4),
        ("shardgrad", 4, 2, "shardgrad", 4, 1),
        ("shardgrad", 4, 1, "shardgrad", 1, 1),
        ("shardgrad", 1, 1, "shardgrad", 4, 4),
    ],
)
def test_a_checkpoint_loads_on_other_ranks_meshes_and_engines(
    worlds: dict[int, Ranks],
    tmp_path: Path,
    source: str,
    writers: int,
    write_replicas: int,
    target: str,
    readers: int,
    read_replicas: int,
) -> None:
    folder = str(tmp_path / "c")
    right = worlds[writers].run(save, source, folder, write_replicas)[0]
    # Every element once, whatever the number of replicas.
    stored = checkpoint.read_metadata(folder).state_dict_metadata
    assert sum(len(entry.chunks) for entry in stored.values() if hasattr(entry, "chunks")) <= (
        len(right) * writers // write_replicas
    )
    worlds[readers].run(load, target, folder, read_replicas, right)


def all_ranks_refuse_alike(folder: str) -> list[str]:
    """What is wrong on one rank only is said by all, in the same words."""
    rank, told = dist.get_rank(), []
    mesh = init_device_mesh("cpu", (2,))
    state = {"x": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]), "n": 1}
    checkpoint.save(state, folder)
    before = os.listdir(folder)

    def refused(work: Any, kind: type[Exception]) -> None:
        with pytest.raises(kind) as caught:
            work()
        told.append(str(caught.value))
        assert torch.equal(state["x"].full_tensor(), torch.arange(10.0))

    odd = state | {"y": object()} if rank == 1 else state
    refused(lambda: checkpoint.save(odd, folder), CheckpointError)
    refused(lambda: checkpoint.load(odd, folder), CheckpointError)
    more = state | {"y": torch.zeros(2)} if rank == 1 else state
    refused(lambda: checkpoint.load(more, folder), CheckpointError)
    assert os.listdir(folder) == before
    # Damage to a file that rank 1 verifies.
    data = Path(folder) / "__0_0.distcp"
    dist.barrier()
    if rank == 1:
        content = bytearray(data.read_bytes())
        content[300] ^= 1
        data.write_bytes(content)
    dist.barrier()
    refused(lambda: checkpoint.load(state, folder), CheckpointError)
    # A folder that only rank 0 can be said to have: rank 1 looks for its part elsewhere.
    elsewhere = folder + ("2" if rank == 0 else "/missing/deeper")
    refused(lambda: checkpoint.save(state, elsewhere), CheckpointError)
    return told


def test_what_is_wrong_on_one_rank_is_refused_by_all_in_the_same_words(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    ours, theirs = two_ranks.run(all_ranks_refuse_alike, str(tmp_path / "c"))
    assert ours == theirs
    assert all("rank 1" in words for words in ours)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@on_ranks(4)
def test_a_rank_of_a_smaller_group_is_named_by_its_number_in_the_world() -> None:
    group = dist.new_group([2, 3])
    if dist.get_rank() in (2, 3):
        state = {"y": object() if dist.get_rank() == 3 else 1}
        with pytest.raises(CheckpointError, match="; rank 3"):
            checkpoint.save(state, "never written", group=group)


def kept_copies_follow_a_load(folder: str, **options: Any) -> None:
    """Some stages keep whole parameters, or a second cut of them, from step to step."""
    if options.get("zero_stage") == "hfsdp":
        options["mesh"] = hsdp_mesh(1, 2)
    model = shardgrad.fully_shard(nn.Sequential(nn.Linear(8, 8)), **options)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 8)
    saved = model(x).detach().clone()
    checkpoint.save({"model": model.state_dict()}, folder)
    model(x).sum().backward()
    optim.step()
    with torch.no_grad():
        assert not torch.equal(model(x), saved)
    checkpoint.load({"model": model.state_dict()}, folder)
    assert torch.equal(model(x), saved)


@pytest.mark.parametrize("stage", [1, 2, 3, "hfsdp"])
def test_the_first_forward_after_a_load_computes_with_what_was_loaded(
    two_ranks: Ranks, tmp_path: Path, stage: int | str
) -> None:
    two_ranks.run(kept_copies_follow_a_load, str(tmp_path / "c"), zero_stage=stage)


def nothing_unloadable_is_completed(folder: str) -> list[str]:
    """Tries to save what would not load; returns what every rank was told."""
    rank, told = dist.get_rank(), []
    mesh = init_device_mesh("cpu", (2,))
    state = {"x": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])}
    alone = dist.new_group([0])

    def refused(work: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            work()
        told.append(str(caught.value))

    # The disk that rank 1 sees is not that of rank 0.
    local = Path(folder, "local") if rank else Path(folder)
    refused(lambda: checkpoint.save(state, local))
    # A half of "x" is not with the ranks that save.
    if rank == 0:
        with pytest.raises(CheckpointError, match="do not cover the tensor x"):
            checkpoint.save(state, folder, group=alone)
    assert not Path(folder).exists()
    return told


def test_a_checkpoint_that_would_not_load_is_never_completed(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    ours, theirs = two_ranks.run(nothing_unloadable_is_completed, str(tmp_path / "c"))
    assert ours == theirs
    assert "__1_0.distcp" in ours[0]


def ranks_open_one_checkpoint(folder: str) -> None:
    """As on a network disk, where one machine still sees the list of files of a while ago."""
    mesh = init_device_mesh("cpu", (2,))
    state = {"x": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}
    for step in range(2):
        full = torch.full((4,), float(step))
        checkpoint.save({"x": distribute_tensor(full, mesh, [Shard(0)])}, f"{folder}/{step}")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing or damaged(.|\n)*rank 1"):
        checkpoint.load(state, f"{folder}/{dist.get_rank()}")
    assert not state["x"].to_local().any()


def test_ranks_that_see_different_checkpoints_load_none(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(ranks_open_one_checkpoint, str(tmp_path))


def a_model_is_exported_whole(folder: str) -> None:
    model, _ = build(SHARDGRAD, 0, 1)
    checkpoint.save({"model": model.state_dict()}, f"{folder}.saved")
    if dist.get_rank() == 0:
        checkpoint.export_checkpoint(f"{folder}.saved", folder, only="model", file_nbytes=600)
    dist.barrier()
    found: Tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= import_module("safetensors.torch").load_file(path)
    plain = tower(seed=1)
    plain.load_state_dict(found)
    assert_same_bits(dict(plain.named_parameters()), dict(tower(seed=0).named_parameters()))
    # And back.
    model, _ = build(SHARDGRAD, 1, 1)
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(folder))
    loaded = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    assert_same_bits(loaded, dict(tower(seed=0).named_parameters()))


def test_a_sharded_model_is_exported_whole(two_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    two_ranks.run(a_model_is_exported_whole, str(tmp_path / "st"))
    assert len(list((tmp_path / "st").iterdir())) > 2


# -- memory

TENSORS, TENSOR_NBYTES = 6, 16 * MIB


def peak_nbytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def big(mesh: Any, value: float) -> dict[str, torch.Tensor]:
    rows = TENSOR_NBYTES // 4 // 1024
    local = torch.full((rows // mesh.size(), 1024), value)
    return {
        f"t{i}": DTensor.from_local(local + i, mesh, [Shard(0)], run_check=False)
        for i in range(TENSORS)
    }


def save_big(folder: str) -> None:
    checkpoint.save(big(init_device_mesh("cpu", (dist.get_world_size(),)), 1.0), folder)


def load_big(folder: str) -> int:
    """Returns how much more memory than before this rank had at its peak."""
    state = big(init_device_mesh("cpu", (dist.get_world_size(),)), 0.0)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_nbytes()
    checkpoint.load(state, folder)
    extra = peak_nbytes() - before
    for i in range(TENSORS):
        assert (state[f"t{i}"].to_local() == 1.0 + i).all()
    return extra


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1)])
def test_loading_on_other_ranks_does_not_need_the_memory_of_the_whole(
    worlds: dict[int, Ranks], tmp_path: Path, writers: int, readers: int
) -> None:
    worlds[writers].run(save_big, str(tmp_path / "c"))
    for extra in worlds[readers].run(load_big, str(tmp_path / "c")):
        assert extra < 5 * TENSOR_NBYTES, f"{extra / MIB:.1f} MiB"
