"""Checkpoints of several ranks: cut one way and loaded another, by either engine, agreed upon by
all.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

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


def what_is_told(operation: str, fault: str, folder: Path) -> str:
    """Saves or loads while something is wrong on rank 1; returns what this rank is told."""
    mesh = init_device_mesh("cpu", (2,))
    numbers = torch.arange(20_000.0)
    x = distribute_tensor(numbers, mesh, [Shard(0)])
    state: dict[str, Any] = {"x": x, "n": 1}
    checkpoint.save(state, folder / "load")
    checkpoint.save(state | {"x": x + 1}, folder / "elsewhere" / "load")
    path = folder / operation
    with ExitStack() as faults:
        if dist.get_rank() == 1:
            if fault == "has what is no data":
                state["y"] = object()
            elif fault == "has more":
                state["y"] = torch.zeros(2)
            elif fault == "lacks its half":
                del state["x"]
            elif fault == "looks elsewhere":  # or has an old list of the files on a network disk
                path = folder / "elsewhere" / operation
            elif fault == "finds a changed byte":
                with (path / "__0_0.distcp").open("r+b") as stream:
                    stream.seek(500)
                    stream.write(b"!")
            elif fault == "may not write much":  # torch's archive writer hides why, ours does not
                limits = resource.getrlimit(resource.RLIMIT_FSIZE)
                faults.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
            else:
                path = Path(os.path.relpath(path))
                call = {"cannot sync": "fsync", "has no working directory": "getcwd"}[fault]
                error = OSError(errno.EIO, os.strerror(errno.EIO))
                faults.enter_context(mock.patch.object(os, call, side_effect=error))
        faults.enter_context(caught := pytest.raises(CheckpointError))
        getattr(checkpoint, operation)(state, path)
    assert torch.equal(x.full_tensor(), numbers)
    text = str(caught.excinfo.value)
    has_failed_here = f"; rank {dist.get_rank()}" in text
    assert (caught.excinfo.value.__cause__ is not None) == has_failed_here
    return text


@pytest.mark.parametrize(
    ("operation", "fault", "words"),
    [
        ("save", "has what is no data", "of type object.* y; rank 1"),
        ("load", "has more", "y is missing.*; rank 1"),
        ("save", "lacks its half", "key:x invalid fill.*; rank 0"),
        ("save", "looks elsewhere", "No such file.*__1_0.distcp.*; rank 1"),
        ("load", "looks elsewhere", "__0_0.distcp is missing or damaged.*; rank 1"),
        ("load", "finds a changed byte", "__0_0.distcp is missing or damaged.*; rank 1"),
        ("save", "may not write much", "File too large.*__1_0.distcp.*; rank 1"),
        ("save", "cannot sync", "Input/output error.*__1_0.distcp.*; rank 1"),
        ("save", "has no working directory", "Input/output error.*; rank 1"),
    ],
)
def test_what_is_wrong_on_one_rank_is_refused_by_all_in_the_same_words(
    two_ranks: Ranks, tmp_path: Path, operation: str, fault: str, words: str
) -> None:
    ours, theirs = two_ranks.run(what_is_told, operation, fault, tmp_path)
    assert ours == theirs
    assert re.search(words, ours, re.DOTALL), ours
    for folder in (tmp_path, tmp_path / "elsewhere"):
        assert {path.name for path in folder.iterdir()} <= {"load", "elsewhere"}


@on_ranks(4)
def test_a_rank_of_a_smaller_group_is_named_by_its_number_in_the_world() -> None:
    group = dist.new_group([2, 3])
    # The lowest that failed; others are refused before any collective.
    says = "; rank 2" if dist.get_rank() in (2, 3) else "not in the checkpoint's process group"
    with pytest.raises(CheckpointError, match=says):
        checkpoint.save({"y": object()}, "never written", group=group)


@on_ranks(2)
def test_what_one_rank_alone_does_not_hold_entirely_is_not_saved(tmp_path: Path) -> None:
    mesh, alone = init_device_mesh("cpu", (2,)), dist.new_group([0])
    state = {"x": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])}
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="do not cover the tensor x"):
            checkpoint.save(state, tmp_path / "c", group=alone)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [1, 2, 3, "hfsdp"])
@on_ranks(2)
def test_the_first_forward_after_a_load_computes_with_what_was_loaded(
    tmp_path: Path, stage: Any
) -> None:
    """Some stages keep whole parameters, or a second cut of them, from step to step."""
    mesh = hsdp_mesh(1, 2) if stage == "hfsdp" else None
    model = shardgrad.fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=mesh, zero_stage=stage)
    optim = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(1, 8)
    saved = model(x).detach().clone()
    checkpoint.save({"model": model.state_dict()}, tmp_path / "c")
    model(x).sum().backward()
    optim.step()
    with torch.no_grad():
        assert not torch.equal(model(x), saved)
    squares = sum(param.square().sum() for param in model.parameters())
    checkpoint.load({"model": model.state_dict()}, tmp_path / "c")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()  # of the former weights, as in plain torch
    assert torch.equal(model(x), saved)


@on_ranks(2)
def test_a_part_that_one_rank_alone_has_is_loaded_by_it_alone(tmp_path: Path) -> None:
    name, value = f"stage_{dist.get_rank()}", torch.full((3,), 1.0 + dist.get_rank())
    checkpoint.save({name: value}, tmp_path / "saved")
    loaded = checkpoint.load({name: torch.zeros(3)}, tmp_path / "saved")
    assert torch.equal(loaded[name], value)


def a_model_is_exported_whole(folder: str) -> None:
    model, _ = build(SHARDGRAD, 0, 1)
    state = {"model": model.state_dict(), "model_ema": {"step": torch.ones(3)}}
    checkpoint.save(state, f"{folder}.saved")
    if dist.get_rank() == 0:
        checkpoint.export_checkpoint(f"{folder}.saved", folder, only="model", file_nbytes=600)
    dist.barrier()
    model, _ = build(SHARDGRAD, 1, 1)
    reader = HuggingFaceStorageReader(folder)
    assert reader.read_metadata().state_dict_metadata.keys() == model.state_dict().keys()
    dcp.load(model.state_dict(), storage_reader=reader)
    loaded = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    assert_same_bits(loaded, dict(tower(seed=0).named_parameters()))


def test_a_sharded_model_is_exported_whole(two_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    two_ranks.run(a_model_is_exported_whole, str(tmp_path / "st"))
    assert len(list((tmp_path / "st").iterdir())) > 2


# -- memory


def peak_nbytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


@on_ranks(2)
def test_loading_another_cut_does_not_need_the_memory_of_the_whole(tmp_path: Path) -> None:
    mesh, nbytes = init_device_mesh("cpu", (2,)), 16 * 2**20

    def tensors(dim: int, value: float) -> dict[str, DTensor]:
        """Returns six tensors that are cut along a dim."""
        local = torch.full((4096, 512) if dim else (2048, 1024), value)
        return {f"t{i}": DTensor.from_local(local + i, mesh, [Shard(dim)]) for i in range(6)}

    checkpoint.save(tensors(0, 1.0), tmp_path / "c")
    ours, right = tensors(1, 0.0), tensors(1, 1.0)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_nbytes()
    checkpoint.load(ours, tmp_path / "c")
    assert peak_nbytes() - before < 5 * nbytes
    assert all(torch.equal(ours[name].to_local(), right[name].to_local()) for name in right)
