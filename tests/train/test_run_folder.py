"""A run folder and its one owner: second starts, and a checkpoint that is damaged."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.train.test_train_program import (
    HALF,
    MICRO,
    TRAIN,
    end,
    ranks_of,
    start,
    train,
    wait_for_steps,
)

pytestmark = pytest.mark.slow


def test_a_second_start_says_who_holds_the_folder_and_since_when_and_a_dead_owner_is_replaced(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    options = [*MICRO, "--steps", "1000000", "--checkpoint-every", "3", "--run-dir", folder]
    first = start(*options, program=TRAIN)
    wait_for_steps(folder, HALF + 1, first)
    writer = ranks_of(first)[0]
    status, _, errors = end(start("--resume", folder))
    assert status == 2
    assert f"(process {writer} on " in errors
    assert "since 20" in errors
    assert "Traceback" not in errors
    assert first.poll() is None, "the first goes on"
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done = int((folder / "checkpoints" / "latest").read_text()[5:])
    assert "Resumed after step" in train("--resume", folder, "--steps", str(done + 4))


def test_a_damaged_checkpoint_is_named_with_how_to_go_on_from_an_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(*MICRO, "--ranks", "1", "--checkpoint-every", "2", "--keep", "3", "--run-dir", folder)
    checkpoints = folder / "checkpoints"
    data = checkpoints / "step_000006" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    status, _, errors = end(start("--resume", folder, "--steps", "9"))
    assert status == 1, errors
    assert "step_000006 cannot be used" in errors
    assert "use an older checkpoint; `shardgrad checkpoint verify` finds undamaged ones" in errors
    assert f"that is named in {checkpoints / 'latest'}" in errors
    assert "newest checkpoint" not in errors
    (checkpoints / "latest").write_text("step_000004\n")
    assert "Resumed after step 4." in train("--resume", folder, "--steps", "9")
