"""A run folder and its one owner: second starts, a terminal that hangs up, a checkpoint that is
damaged.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.processes import FairClock, communicate
from tests.train.test_train_program import (
    HALF,
    LIMIT_S,
    MICRO,
    ROOT,
    TRAIN,
    end,
    losses,
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


def test_a_terminal_that_hangs_up_is_a_request_to_stop(tmp_path: Path) -> None:
    """The terminal is gone when the last lines are written; the step is saved all the same."""
    folder = tmp_path / "run"
    ours, theirs = pty.openpty()
    command = [
        *TRAIN,
        *MICRO,
        "--steps",
        "1000000",
        "--checkpoint-every",
        "1000000",
        "--run-dir",
        str(folder),
    ]
    process = subprocess.Popen(
        # The tests may run under nohup, and an ignored signal stays ignored in children.
        ["env", "--default-signal=HUP", "setsid", "--ctty", "--wait", *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
        text=True,
    )
    os.close(theirs)
    clock = FairClock([process.pid])
    os.set_blocking(ours, False)
    while not ((folder / "metrics.jsonl").exists() and len(losses(folder)) >= 2):
        assert clock.elapsed_s() < LIMIT_S
        assert process.poll() is None
        try:
            os.read(ours, 65536)
        except BlockingIOError:
            time.sleep(0.05)
    os.close(ours)  # the system sends SIGHUP
    communicate(process, LIMIT_S)
    done = max(losses(folder))
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{done:06d}\n"
    assert f"Resumed after step {done}." in train("--resume", folder, "--steps", str(done + 1))


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
    assert "an older checkpoint; `shardgrad checkpoint verify` tells which are undamaged" in errors
    assert f"whose name is in {checkpoints / 'latest'}" in errors
    assert "newest checkpoint" not in errors
    (checkpoints / "latest").write_text("step_000004\n")
    assert "Resumed after step 4." in train("--resume", folder, "--steps", "9")
