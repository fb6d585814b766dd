"""`shardgrad.patch()`: what is replaced, for how long, and programs run under it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed._composable.fsdp as composable
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.pipelining import stage

import shardgrad
from tests.support.processes import run

THEIRS = [torch_fsdp.fully_shard]  # in a list, where no patch looks


def is_theirs(function: object) -> bool:
    return function is THEIRS[0]


def test_every_place_that_programs_look_in_is_patched_and_put_back() -> None:
    places = (
        torch_fsdp,
        composable,
        stage,
        sys.modules[torch_fsdp.fully_shard.__wrapped__.__module__],
    )
    with shardgrad.patch():
        assert not any(is_theirs(place.fully_shard) for place in places)
        assert all(place.fully_shard.__wrapped__ is shardgrad.fully_shard for place in places)
        register = torch_fsdp.register_fsdp_forward_method
        assert register.__wrapped__ is shardgrad.register_fsdp_forward_method
    assert all(is_theirs(place.fully_shard) for place in places)


def test_other_modules_are_patched_under_any_name_and_put_back_and_what_meant_us_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    framework = ModuleType("a_framework")
    monkeypatch.setitem(sys.modules, "a_framework", framework)
    framework.shard = torch_fsdp.fully_shard
    with shardgrad.patch():
        assert framework.shard.__wrapped__ is shardgrad.fully_shard
        framework.imported_meanwhile = torch_fsdp.fully_shard
        framework.ours = shardgrad.fully_shard
    assert is_theirs(framework.shard)
    assert is_theirs(framework.imported_meanwhile)
    assert framework.ours is shardgrad.fully_shard


def test_patches_may_be_nested_and_are_put_back_after_an_exception() -> None:
    with suppress(ZeroDivisionError), shardgrad.patch():
        with shardgrad.patch():
            pass
        assert torch_fsdp.fully_shard.__wrapped__ is shardgrad.fully_shard
        raise ZeroDivisionError
    assert is_theirs(torch_fsdp.fully_shard)


def test_a_copy_kept_in_a_closure_is_torchs_function_afterwards() -> None:
    with shardgrad.patch():
        kept = [torch_fsdp.fully_shard]
    with pytest.raises(ValueError, match="fully_shard") as refused:
        kept[0](nn.ModuleList())
    assert not isinstance(refused.value, shardgrad.ShardgradError)


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
import beside

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(4, 4))
assert isinstance(model, FSDPModule)
model(torch.ones(2, 4)).sum().backward()
print(type(model).__mro__[1].__module__, sys.argv[1:], __name__, beside.HERE)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("named", ["script", "module"])
def test_a_script_runs_unchanged(tmp_path: Path, named: str) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("HERE = 'found'")
    link = tmp_path / "bin" / "program"  # Python looks beside what it refers to
    link.parent.mkdir()
    link.symlink_to(tmp_path / "program.py")
    program = ["-m", "program"] if named == "module" else [link]
    ran = run(
        [sys.executable, "-m", "shardgrad.patch", *program, "--lr", "3", "-x"],
        cwd=tmp_path if named == "module" else None,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout_s=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "shardgrad.module ['--lr', '3', '-x'] __main__ found\n"
