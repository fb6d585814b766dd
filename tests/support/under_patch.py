"""Running a program as it is, and once more inside `shardgrad.patch()`.

A *client program* is a function that knows nothing of this project: it shards with whatever
`torch.distributed.fsdp` and its frameworks give it, trains, and returns its sharded model and what
it noted.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import shardgrad
from tests.support.parity import Tensors, assert_close, assert_same_bits

ClientProgram = Callable[..., tuple[nn.Module, Tensors]]

STARTUP_S = 240.0  # importing transformers, torchao and lightning on a busy machine


def skip_without(package: str) -> None:
    """Skips a test, or a module of them, where a package is not installed. Does not import it."""
    if importlib.util.find_spec(package) is None:
        reason = (
            f"{package} is not installed: pip install {package} (CI has those of the extra "
            "`clients`)"
        )
        pytest.skip(reason, allow_module_level=True)


def same_bits_under_both(program: ClientProgram, *args: Any, **kwargs: Any) -> None:
    """Requires identical losses, notes, parameters and buffers from both engines."""
    ours, theirs = results_under_both(program, *args, **kwargs)
    assert_same_bits(ours, theirs)


def close_under_both(program: ClientProgram, *args: Any, tolerance: float, **kwargs: Any) -> None:
    """Requires equal results up to `tolerance`, where the order or the width of a sum differs."""
    ours, theirs = results_under_both(program, *args, **kwargs)
    assert_close(ours, theirs, tolerance=tolerance)


def results_under_both(
    program: ClientProgram, *args: Any, **kwargs: Any
) -> tuple[Tensors, Tensors]:
    results = []
    for engine in (shardgrad.patch, nullcontext):
        torch.manual_seed(0)
        with engine(), _environment_restored():
            model, notes = program(*args, **kwargs)
        _require_engine(model, ours=engine is shardgrad.patch)
        results.append({**notes, **_whole(model)})
    return results


def _require_engine(model: nn.Module, *, ours: bool) -> None:
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert len(units) > 1, "the program sharded nothing, or only its root"
    assert all(isinstance(unit, shardgrad.FSDPModule) is ours for unit in units)


def _whole(model: nn.Module) -> Tensors:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: whole(tensor) for name, tensor in named}


def whole(tensor: Tensor) -> Tensor:
    """Returns a copy of all of a tensor, on every rank. A collective for a sharded one."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Undoes what frameworks leave in `os.environ`, by which they would configure the next
    program.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def shared_folder() -> Iterator[str]:
    """Yields one empty folder for all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    try:
        yield box[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(box[0])
