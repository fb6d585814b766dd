"""Time limits of tests end what hangs, and not what is slow because the machine is busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import processes
from tests.support.processes import FairClock, communicate, run
from tests.support.ranks import MOST_GROUPS, RankError, Ranks

ROOT = Path(__file__).parents[2]

SPIN = "import time\nwhile time.process_time() < {}: pass"


@contextmanager
def busy_core(others: int) -> Iterator[int]:
    """Makes this process, and those it starts, share one core with so many others; yields the
    core.
    """
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    running = [subprocess.Popen([sys.executable, "-c", SPIN.format(600)]) for _ in range(others)]
    try:
        yield core
    finally:
        for process in running:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, before)


def test_time_in_which_a_program_waits_for_a_core_does_not_count_also_in_what_it_starts() -> None:
    starts = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN.format(0.5)!r}])"
    with busy_core(others=2):
        process = subprocess.Popen([sys.executable, "-c", starts], text=True)
        clock, began_s = FairClock([process.pid]), time.monotonic()
        while process.poll() is None:
            clock.elapsed_s()
            time.sleep(0.05)
        fair_s, wall_s = clock.elapsed_s(), time.monotonic() - began_s
    assert wall_s > 1.0, "it had to share the core"
    assert fair_s < 0.7 * wall_s


def test_a_program_that_ends_while_its_waits_are_read_is_no_error() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert processes._queued_s(process.pid) == {}


def test_a_wait_that_the_system_counts_only_when_it_is_over_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, queued_s = 0.0, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(processes, "_queued_s", lambda pid: {pid: queued_s})
    clock = FairClock()
    now_s = 20.0
    assert clock.elapsed_s() == 20.0
    now_s, queued_s = 30.0, 25.0
    assert clock.elapsed_s() == 5.0


def test_time_in_which_a_program_does_nothing_counts() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], text=True)
    began_s = time.monotonic()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            communicate(process, 0.5)
    finally:
        process.kill()
        process.wait()
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize("works", [True, False], ids=["slow", "hangs"])
def test_the_limit_of_a_test_is_for_what_hangs(works: bool, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support.time_limits import pytest_timeout_set_timer as pytest_timeout_set_timer"
    )
    what = "while time.process_time() - began < 0.6: pass" if works else "time.sleep(60)"
    (tmp_path / "test_it.py").write_text(
        f"import time\ndef test_it():\n    began = time.process_time()\n    {what}"
    )
    options = ["--timeout=1", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    with busy_core(others=2 if works else 0):
        done = run(
            [sys.executable, "-m", "pytest", *options, str(tmp_path)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout_s=100,
        )
    assert done.returncode == (pytest.ExitCode.OK if works else pytest.ExitCode.TESTS_FAILED), (
        done.stdout
    )
    assert works or "Timeout" in done.stdout


def makes_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group()
    return os.getpid()


def _hang_on_one_rank() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def test_a_rank_that_hangs_says_where() -> None:
    with pytest.raises(RankError, match="rank 1:\ndid not finish") as caught:
        Ranks(2).run(_hang_on_one_rank, timeout_s=1.0)
    assert str(caught.value).count("in _hang_on_one_rank") == 1


def test_ranks_that_keep_many_process_groups_are_replaced_before_the_next_test() -> None:
    ranks = Ranks(1)
    try:
        first = ranks.run(makes_groups, 1)
        assert ranks.renewed().run(makes_groups, MOST_GROUPS) == first
        assert ranks.renewed().run(makes_groups, 0) != first
    finally:
        ranks.stop()
