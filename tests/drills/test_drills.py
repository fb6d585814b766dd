"""Faults in the training program end as they have to; `python -m tests.drills` injects more of
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills import table
from tests.drills.faults import CATALOGUE
from tests.drills.hosts import can_have_hosts
from tests.drills.judge import Verdict
from tests.drills.record import append, read

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
    "killed under another launcher",
    "store lost",
    "crash between writes of a checkpoint",
    "disk full",
    "Ctrl-C twice",
    "launcher killed",
    "NaN in the loss",
    "replica differs in one bit",
    "checkpoint truncated",
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


@pytest.mark.long
@pytest.mark.skipif(not can_have_hosts(), reason="network namespaces are not permitted here")
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_link_that_is_cut_permanently_ends_both_hosts() -> None:
    done = drill("--kind", "link cut for good")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_catalogue_has_what_the_short_set_names() -> None:
    names = [kind.name for kind in CATALOGUE]
    assert len(names) == len(set(names)) >= 25
    assert set(SHORT) <= set(names)


def test_a_kind_that_there_is_not_is_refused() -> None:
    done = drill("--kind", "flood")
    assert done.returncode == 2
    assert "see --list" in done.stderr


# -- the record
# ---------------------------------------------------------------------------------------------


def verdict(kind: str, exit_s: float, *problems: str) -> Verdict:
    return Verdict(kind, 0, 2, "rank 1, step 5, forward", "Rank 1 was ended.", exit_s, 2, problems)


def test_the_table_of_drills_is_made_of_their_record(tmp_path: Path) -> None:
    record = tmp_path / "new" / "drills.jsonl"
    held = [verdict("killed", 1.0), verdict("stopped", 9.0, "it hangs"), verdict("killed", 2.5)]
    for each in held:
        append(record, each, {"git": "0" * 40})
    assert read(record) == held
    page = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    fresh = table.renewed(page, held)
    assert "3 drills of 2 kinds, 1 of them wrong.\n" in fresh
    assert "| killed | 2 | 0 | 2 | 1.8 | 2.5 |\n| stopped | 1 | 1 | 1 | 9.0 | 9.0 |\n" in fresh
    assert fresh.startswith("before\n")
    assert fresh.endswith("\nafter\n")
    assert table.renewed(fresh, held) == fresh
    with pytest.raises(ValueError, match="lacks the marks"):
        table.renewed("no marks", held)


def test_the_long_run_is_what_the_page_says_and_of_known_code() -> None:
    if not table.RECORD.exists():
        pytest.skip("no long run has been recorded")
    text = table.PAGE.read_text(encoding="utf-8")
    assert table.renewed(text, read(table.RECORD)) == text
    lines = table.RECORD.read_text(encoding="utf-8").splitlines()
    assert all(json.loads(line)["environment"]["git_is_clean"] for line in lines)
