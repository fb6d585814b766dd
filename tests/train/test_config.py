"""Settings: from flags and files, with limits in words, and fitted to other ranks when resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardgrad.programs.cli import main
from shardgrad.programs.train.config import TrainConfig, mesh_shape, read_settings, resumed
from shardgrad.programs.train.failure import UsageError

SAVED = TrainConfig(ranks=2, batch_size=8, accumulate=1, steps=50)


def test_what_a_run_writes_is_what_a_resume_reads(tmp_path: Path) -> None:
    config = TrainConfig(
        override={"layers": 3, "tied": False}, mesh="2x2", ranks=4, lr=1, precision="bf16-mixed"
    )
    path = tmp_path / "config.json"
    path.write_text(config.to_json())
    assert TrainConfig(**read_settings(path)) == config


def test_for_a_misspelt_name_another_is_proposed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"stepz": 3}')
    with pytest.raises(UsageError, match="did you mean 'steps'"):
        read_settings(path)
    with pytest.raises(UsageError, match="did you mean 'width'"):
        TrainConfig(override={"widht": 2})


def test_meshes_are_one_number_or_two() -> None:
    assert [mesh_shape(text) for text in (None, "4", "2x3", "2X3")] == [(), (4,), (2, 3), (2, 3)]
    with pytest.raises(UsageError, match="room for 4 ranks, not 3"):
        TrainConfig(mesh="2x2", ranks=3)


@pytest.mark.parametrize(
    ("ranks", "batch_size", "accumulate"), [(1, 8, 2), (2, 8, 1), (4, 4, 1), (8, 2, 1), (16, 1, 1)]
)
def test_other_ranks_share_the_same_global_batch(
    ranks: int, batch_size: int, accumulate: int
) -> None:
    config = resumed(SAVED, {}, world_size=ranks)
    assert (config.ranks, config.batch_size, config.accumulate) == (ranks, batch_size, accumulate)
    assert config.global_batch(ranks) == SAVED.global_batch(2)


def test_ranks_that_cannot_share_the_batch_are_refused_unless_it_is_given_anew() -> None:
    with pytest.raises(UsageError, match="16 sequences per step cannot be shared by 3 ranks"):
        resumed(SAVED, {"ranks": 3}, world_size=None)
    assert resumed(SAVED, {"ranks": 3, "batch_size": 5}, world_size=None).batch_size == 5


def test_the_largest_batch_is_shared_at_once() -> None:
    """The divisor is looked for among the sizes up to the saved one."""
    saved = TrainConfig(ranks=2, batch_size=3 * 2**18, accumulate=2**40)
    config = resumed(saved, {"ranks": 3}, world_size=None)
    assert config.batch_size * config.accumulate * 3 == 3 * 2**18 * 2**40 * 2
    assert config.batch_size <= saved.batch_size


def test_a_resumed_run_keeps_what_is_not_given_anew() -> None:
    config = resumed(SAVED, {"steps": 80}, world_size=None)
    assert config == dataclasses.replace(SAVED, steps=80)


def test_the_mesh_of_other_ranks_is_forgotten_and_a_new_one_brings_its_own_ranks() -> None:
    saved = TrainConfig(ranks=4, mesh="2x2", batch_size=4)
    assert resumed(saved, {}, world_size=2).mesh is None
    config = resumed(saved, {"mesh": "2x4"}, world_size=None)
    assert (config.ranks, config.batch_size) == (8, 2)


@pytest.mark.parametrize("change", [{"preset": "small"}, {"override": {"layers": 9}}])
def test_a_resumed_run_keeps_its_model(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="would change the model that was saved"):
        resumed(SAVED, change, world_size=None)


def test_the_command_line_has_every_setting() -> None:
    shown = CliRunner().invoke(main, ["train", "--help"], terminal_width=200).output
    for one in dataclasses.fields(TrainConfig):
        flag = one.name.replace("_", "-")
        assert f"--{flag} " in shown or f"--no-{flag} " in shown, flag


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"steps": 7, "mesh": "3x"}')
    for flags, words in (([], "--mesh 3x is not a mesh"), (["--mesh", "2y"], "--mesh 2y is not")):
        result = CliRunner().invoke(main, ["train", "--config", str(path), *flags])
        assert words in result.stderr
    path.write_text('{"steps": -7}')
    result = CliRunner().invoke(main, ["train", "--config", str(path)])
    assert f"{path} sets 'steps': -7 is not in the range x>=1" in result.stderr
