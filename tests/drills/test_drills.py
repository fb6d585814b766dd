"""Faults in the training program end as they have to; `python -m tests.drills` injects more of
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 100  # of one drill, on a busy machine

# One for each way in which a fault is noticed; the long run has all kinds, several times.
SHORT = [
    "killed in reduction",
    "stopped in forward",
    "slowed for a moment in optimizer",
    "exception on one rank",
    "out of memory in backward",
    "one rank leaves the order",
    "crash between writes of a checkpoint",
    "disk full",
    "Ctrl-C twice",
    "launcher killed",
    "NaN in the loss",
]


def drill(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.drills", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
@pytest.mark.timeout(len(SHORT) * LIMIT_S)
def test_every_fault_ends_in_time_is_named_and_is_recovered_from() -> None:
    done = drill(*(word for kind in SHORT for word in ("--kind", kind)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SHORT)} drills, 0 of them wrong." in done.stdout
