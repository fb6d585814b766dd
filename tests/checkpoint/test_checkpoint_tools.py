"""Checkpoints looked at, checked and exported, from Python and from the command line."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from shardgrad import checkpoint
from shardgrad.checkpoint import export_checkpoint
from shardgrad.errors import (
    CheckpointError,
)
from shardgrad.programs.cli import main
from tests.checkpoint.test_checkpoint import LARGE, same, state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(state(0, LARGE), tmp_path / "ours")
    return tmp_path / "ours"


def flip_a_bit(folder: Path, at: int) -> None:
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    content[at] ^= 1
    (folder / "__0_0.distcp").write_bytes(content)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def test_what_python_3_11_0_to_3_11_3_pickles_of_torch_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduced(member: Enum, _: int) -> tuple[object, tuple[object, str]]:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    checkpoint.save(state(), tmp_path / "c")
    assert b"getattr" in (tmp_path / "c" / ".metadata").read_bytes()
    assert same(checkpoint.load(state(1), tmp_path / "c"), state())


def exported(tensors: dict[str, torch.Tensor], folder: Path, **options: Any) -> Path:
    """Saves a checkpoint, and exports it into a folder."""
    checkpoint.save(tensors, folder.with_suffix(".saved"))
    export_checkpoint(folder.with_suffix(".saved"), folder, **options)
    return folder


def test_safetensors_files_hold_the_model_in_files_of_a_size(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    model = state(0, LARGE)["model"]
    model["tied"] = model["also tied"] = model["a/b~c"]
    one = exported(model, tmp_path / "one")
    assert [path.name for path in one.iterdir()] == ["model.safetensors"]
    assert same(load_file(one / "model.safetensors"), model)
    # The first is larger than a file.
    five = {f"t{i}": torch.full((256 if i else 1024,), float(i)) for i in range(5)}
    many = exported(five, tmp_path / "many", file_nbytes=2 * 1024)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 2, 3, 3)]
    assert index["weight_map"] == dict(zip(five, files, strict=True))
    assert index["metadata"]["total_size"] == 8 * 1024
    assert len(list(many.iterdir())) == 4
    for name, file in index["weight_map"].items():
        assert same(load_file(many / file)[name], five[name])


@pytest.mark.parametrize("why", ["damaged", "No space left"])
def test_an_export_that_fails_leaves_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    package = pytest.importorskip("safetensors.torch")
    if why == "damaged":
        flip_a_bit(saved, 500)
    else:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(package, "save_file", full)
    with pytest.raises(CheckpointError, match=why):
        export_checkpoint(saved, tmp_path / "st")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_checkpoint_becomes_safetensors(saved: Path, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    result = run("export", saved, tmp_path / "st", "--only", "model")
    assert result.exit_code == 0, result.output
    assert same(load_file(tmp_path / "st" / "model.safetensors"), state(0, LARGE)["model"])
    (tmp_path / "new").touch()  # with the umask's mode
    (made,) = (tmp_path / "st").iterdir()
    assert made.stat().st_mode == (tmp_path / "new").stat().st_mode
    result = run("export", saved, tmp_path / "other", "--only", "modem")
    assert "no tensors under modem" in result.stderr
    assert not (tmp_path / "other").exists()


def test_verify_says_whether_every_byte_is_right(saved: Path) -> None:
    result = run("verify", saved)
    assert (result.exit_code, result.output) == (
        0,
        f"{saved} is complete and undamaged: 2 files, 6 MiB.\n",
    )
    flip_a_bit(saved, -1)
    result = run("verify", saved)
    assert result.exit_code == 1
    assert "__0_0.distcp is missing or damaged" in result.stderr


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    series = checkpoint.Series(tmp_path / "run" / "checkpoints")
    for step in (3, 6):
        path = series.path_of(step)
        checkpoint.save({"n": step}, path, then=lambda path=path: series.publish(path))
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        assert f"{series.path_of(6)} is complete" in run("verify", place).output
