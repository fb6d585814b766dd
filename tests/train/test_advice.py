"""What to do when the newest checkpoint cannot be used: advice names nothing that is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardgrad import checkpoint
from shardgrad.errors import CheckpointError
from shardgrad.train.checkpoint import Checkpoints


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def link_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = [flip_a_bit, link_nowhere, cut, remove]


def advice(folder: Path) -> str:
    checkpoints = Checkpoints(folder, keep=9)
    newest = checkpoints.latest()
    assert newest is not None
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load({"x": torch.empty(64), "n": 0}, newest)
    return checkpoints._advice(newest, caught.value)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_advice_never_names_a_damaged_checkpoint(
    name: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    for step in (2, 4, 6):
        checkpoint.save(
            {"x": torch.full((64,), float(step)), "n": step}, tmp_path / f"step_{step:06d}"
        )
    (tmp_path / "latest").write_text("step_000006")
    if name == ".metadata" and damage in (link_nowhere, remove):
        # One that is not complete is not the newest.
        damage(tmp_path / "step_000006" / name)
        assert Checkpoints(tmp_path, keep=9).latest() == tmp_path / "step_000004"
        return
    damage(tmp_path / "step_000006" / name)
    assert "write step_000004, which is whole" in advice(tmp_path)
    damage(tmp_path / "step_000004" / name)
    words = advice(tmp_path)
    assert "write step_000002, which is whole" in words
    assert "step_000004" not in words
    damage(tmp_path / "step_000002" / name)
    assert (
        advice(tmp_path)
        == "no older checkpoint is whole, so start the run again, with another --run-dir"
    )


def test_another_version_of_the_format_is_no_damage(tmp_path: Path) -> None:
    for step in (2, 4):
        folder = tmp_path / f"step_{step:06d}"
        checkpoint.save({"x": torch.full((64,), float(step)), "n": step}, folder)
        manifest = (folder / "manifest.json").read_bytes()
        (folder / "manifest.json").write_bytes(manifest.replace(b'"version":1', b'"version":2'))
    assert "pip install --upgrade shardgrad; or remove its manifest.json" in advice(tmp_path)


def test_checkpoints_that_take_long_to_read_are_left_to_the_command_that_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        checkpoint.save(
            {"x": torch.full((64,), float(step)), "n": step}, tmp_path / f"step_{step:06d}"
        )
    flip_a_bit(tmp_path / "step_000004" / "__0_0.distcp")
    monkeypatch.setattr("shardgrad.train.checkpoint._QUICKLY_READ_NBYTES", 100)
    words = advice(tmp_path)
    assert "an older checkpoint, which `shardgrad checkpoint verify` finds whole" in words
    assert "step_00000" not in words


def test_a_checkpoint_that_is_whole_and_does_not_fit_is_not_called_damaged(tmp_path: Path) -> None:
    checkpoint.save({"x": torch.ones(32), "n": 2}, tmp_path / "step_000002")
    assert "whole" not in advice(tmp_path)
