"""What is said about plans is true: the page on scaling says what the planner says."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("options", "limit_s"),  # seconds of one core
    [
        pytest.param(["--preset=70b", "--ranks=16384"], 60, id="70b"),
        pytest.param(
            ["--preset=70b", "--mesh=2048x8", "--stage=hfsdp"], 180, id="70b on two levels"
        ),
    ],
)
def test_the_largest_plans_take_a_few_minutes_of_one_core_and_4_gib(
    options: list[str], limit_s: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "shardgrad", "plan", "--activation-checkpointing=full"]
    with (tmp_path / "plan.txt").open("wb") as out:
        process = subprocess.Popen([*command, *options], cwd=ROOT, stdout=out)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert "tokens/s of all ranks" in (tmp_path / "plan.txt").read_text(encoding="utf-8")
    assert used.ru_maxrss * 1024 < 4 * 2**30
    # Of the processor, not of the clock; even so, others on the same cores slow it down by half.
    if used.ru_utime >= limit_s and os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip(f"the machine is busy, so {used.ru_utime:.0f} s say nothing about the planner")
    assert used.ru_utime < limit_s


def test_the_page_on_scaling_says_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row; `python docs/scaling.py --check` looks at all of them, which takes minutes."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("scaling")
    row = tables.weak_row("8b FSDP 8", None)
    assert row in tables.PAGE.read_text(encoding="utf-8")
