"""What a run leaves on the machine when it has ended: nothing, however it ended."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drills.processes import losses, orphaned_segments
from tests.support.processes import FairClock, communicate

ROOT = Path(__file__).parents[2]
LIMIT_S = 150  # a few seconds on a quiet machine
SHAPE = ("width=16", "layers=1", "hidden=16", "heads=2", "kv_heads=2")
NUMBERS = {
    "checkpoint-every": 2,
    "keep": 2,
    "seq-len": 16,
    "batch-size": 2,
    "eval-samples": 4,
    "log-every": 1,
}
STATUSES = {"success": 0, "error": 1, "Ctrl-C twice": 130, "killed parent": -signal.SIGKILL}


def start(folder: Path, temporary: Path, steps: int) -> subprocess.Popen[str]:
    """Starts two ranks in a new session."""
    options = [f"--override={part}" for part in SHAPE] + [
        f"--{key}={of}" for key, of in NUMBERS.items()
    ]
    options += [
        "--device=cpu",
        "--no-plot",
        "--sample-bytes=0",
        f"--data={argparse.__file__}",
        f"--steps={steps}",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "shardgrad", "train", *options, "--ranks=2", f"--run-dir={folder}"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def members(session: int) -> list[int]:
    """The processes of a session that run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # no process, or one that has just ended
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(entry.name))
    return found


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    clock = FairClock()
    while not holds():
        if clock.elapsed_s() > LIMIT_S:
            pytest.fail(f"{what}: not within {LIMIT_S} s")
        time.sleep(0.02)


def end(how: str, process: subprocess.Popen[str]) -> None:
    if how == "error":
        is_rank = {
            pid: b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
            for pid in members(process.pid)
        }
        os.kill(max(pid for pid in is_rank if is_rank[pid]), signal.SIGKILL)
    elif how == "Ctrl-C twice":
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(1.3)  # shorter, and it would count as an echo of the first
    elif how == "killed parent":
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(
    "how",
    [
        "success",
        "killed parent",
        pytest.param("error", marks=pytest.mark.long),
        pytest.param("Ctrl-C twice", marks=pytest.mark.long),
    ],
)
def test_no_process_shared_memory_or_temporary_file_is_left(how: str, tmp_path: Path) -> None:
    folder, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    segments = orphaned_segments()
    process = start(folder, temporary, steps=3 if how == "success" else 1_000_000)
    try:
        if how != "success":
            wait_for("three steps", lambda: max(losses(folder), default=0) >= 3)
            end(how, process)
        _, errors = communicate(process, LIMIT_S)
        assert process.returncode == STATUSES[how], errors
        wait_for("the end of every rank", lambda: not members(process.pid))
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    assert "Traceback" not in errors
    if how == "killed parent":  # a request to stop, which ranks hear without their launcher
        latest = (folder / "checkpoints" / "latest").read_text()
        assert latest == f"step_{max(losses(folder)):06d}\n"
    assert orphaned_segments() <= segments
    assert list(temporary.iterdir()) == []
