"""Settings: from flags and files, with limits in words, and fitted to other ranks when resumed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardgrad.programs.cli import main
from shardgrad.programs.train.config import TrainConfig, read_settings, resumed
from shardgrad.programs.train.failure import UsageError

SAVED = TrainConfig(ranks=2, batch_size=8, accumulate=1, steps=50)


def test_what_a_run_writes_is_what_a_resume_reads(tmp_path: Path) -> None:
    config = TrainConfig(ranks=4, lr=1, precision="bf16-mixed")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dataclasses.asdict(config)))
    assert TrainConfig(**read_settings(path)) == config


def test_settings_are_read_from_a_file_of_some_size_only(tmp_path: Path) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.touch()
    os.truncate(large, 2**20 + 1)
    for path, why in (
        (pipe, "at most 1 MiB"),
        (large, "at most 1 MiB"),
        (tmp_path / "x", "No such"),
    ):
        with pytest.raises(UsageError, match=f"{path.name} cannot be read .*{why}"):
            read_settings(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [('{"stepz": 3}', "there is no setting 'stepz'"), ('{"steps": -7}', "steps: -7 is not in")],
)
def test_an_unknown_name_or_value_of_a_file_is_refused(
    tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=rf"x.json cannot be read \({says}"):
        read_settings(path)


@pytest.mark.parametrize(
    ("before", "ranks", "batch_size", "accumulate"), [(8, 1, 8, 2), (8, 16, 1, 1), (6, 3, 2, 2)]
)
def test_other_ranks_share_the_same_global_batch(
    before: int, ranks: int, batch_size: int, accumulate: int
) -> None:
    saved = dataclasses.replace(SAVED, batch_size=before)
    config = resumed(saved, {"ranks": ranks})
    assert (config.ranks, config.batch_size, config.accumulate) == (ranks, batch_size, accumulate)
    assert config.global_batch(ranks) == saved.global_batch(2)


def test_ranks_that_cannot_share_the_batch_are_refused_unless_it_is_given_anew() -> None:
    with pytest.raises(UsageError, match="steps of 16 sequences cannot be divided among 3 ranks"):
        resumed(SAVED, {"ranks": 3})
    assert resumed(SAVED, {"ranks": 3, "batch_size": 5}).batch_size == 5


def test_a_resumed_run_keeps_its_model_and_what_is_not_given_anew() -> None:
    assert resumed(SAVED, {"steps": 80}) == dataclasses.replace(SAVED, steps=80)
    with pytest.raises(UsageError, match="would change the model that was saved"):
        resumed(SAVED, {"preset": "small"})


def test_the_command_line_has_every_setting() -> None:
    shown = CliRunner().invoke(main, ["train", "--help"], terminal_width=200).output
    for one in dataclasses.fields(TrainConfig):
        flag = one.name.replace("_", "-")
        assert f"--{flag} " in shown or f"--no-{flag} " in shown, flag
