"""torchrun restarts the ranks after a failure with the same command line, and the run continues."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.drills.processes import losses
from tests.support.processes import FairClock, communicate

ROOT = Path(__file__).parents[2]
STEPS, EVERY, LIMIT_S = 30, 5, 250
SHAPE = ("width=16", "layers=1", "hidden=16", "heads=2", "kv_heads=2")
NUMBERS = {
    "steps": STEPS,
    "checkpoint-every": EVERY,
    "seq-len": 16,
    "batch-size": 2,
    "eval-samples": 4,
}


def command(folder: Path, *launcher: str) -> list[str]:
    options = [f"--override={part}" for part in SHAPE] + [
        f"--{key}={value}" for key, value in NUMBERS.items()
    ]
    options += [
        "--log-every=1",
        "--device=cpu",
        "--no-plot",
        "--sample-bytes=0",
        f"--data={argparse.__file__}",
    ]
    return [sys.executable, *launcher, "-m", "shardgrad", "train", *options, f"--run-dir={folder}"]


def start(words: list[str]) -> subprocess.Popen[str]:
    # torchrun's own store would keep the addresses of ranks that have ended, and the next ones
    # might wait.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        words, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def rank_1_of(process: subprocess.Popen[str]) -> int | None:
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            names = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue
        if parent == process.pid and b"RANK=1" in names:
            return int(entry.name)
    return None


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_run_that_torchrun_restarts_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
    )
    process = start(command(tmp_path / "broken", *launcher))
    clock = FairClock([process.pid])
    while clock.elapsed_s() < LIMIT_S and process.poll() is None:
        if max(losses(tmp_path / "broken"), default=0) > EVERY:
            break
        time.sleep(0.01)
    pid = rank_1_of(process)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    _, errors = communicate(process, LIMIT_S)
    assert process.returncode == 0, errors
    whole = start([*command(tmp_path / "whole"), "--ranks=2"])
    _, errors = communicate(whole, LIMIT_S)
    assert whole.returncode == 0, errors
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    lines = (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["event"] == "start" for line in lines) == 2
