"""The audit's tools; with `-m long`, every mutant is noticed by the test that is known to notice
it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants import generate
from tests.mutants.mutant import (
    PACKAGE,
    ROOT,
    Mutant,
    StaleError,
    all_mutants,
    equivalent,
    generated,
    innermost,
    noticed_by,
)

AT_LEAST = 300
SOURCE = """\
import os


class Box:
    @property
    def size(self) -> int:
        os.sync()
        return 3 + 4

    def other(self) -> int:
        return 3 + 4
"""


def tried(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.mutants", "try", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_mutants_are_noticed() -> None:
    done = tried()
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_enough_mutants_in_all_rooms_and_those_struck_off_have_a_reason() -> None:
    mutants = all_mutants()
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names)
    assert len(mutants) >= AT_LEAST, (
        f"{len(generated()) - len(mutants)} mutants are of lines that are no more; type: "
        "python -m tests.mutants renew && python -m tests.mutants try --search 20"
    )
    rooms = {path.name for path in PACKAGE.iterdir() if list(path.glob("*.py"))}
    assert {mutant.room for mutant in mutants} >= rooms
    assert all(len(reason) > 20 for reason in equivalent().values())
    assert not equivalent().keys() & noticed_by().keys()


def test_a_mutant_changes_one_place_and_knows_its_line() -> None:
    mutant = Mutant("", "box.py", "Box.other", "3 + 4", "3 - 4")
    assert mutant.applied(SOURCE) == SOURCE[::-1].replace("4 + 3", "4 - 3", 1)[::-1]
    assert mutant.line(SOURCE) == 11
    assert [innermost(SOURCE, line) for line in (1, 4, 5, 7, 11)] == [
        "",
        "Box",
        *["Box.size"] * 2,
        "Box.other",
    ]


@pytest.mark.parametrize(
    ("function", "before"), [("", "3 + 4"), ("Box.size", "4 + 3"), ("Box.gone", "3 + 4")]
)
def test_a_mutant_of_a_line_that_is_no_more_or_not_alone_is_stale(
    function: str, before: str
) -> None:
    with pytest.raises(StaleError):
        Mutant("", "box.py", function, before, "0").applied(SOURCE)


def test_statements_are_taken_out_of_functions_and_their_docstrings_stay() -> None:
    found = list(
        generate._statements_taken_out(
            'def f(x):\n    """Text."""\n    x.y = 1\n    x.z()\n    return x\n'
        )
    )
    assert sorted((change.first, change.text) for change in found) == [
        (3, "    pass"),
        (4, "    pass"),
    ]


CONTROL = """
import sys
from tests.mutants.__main__ import preload
from tests.mutants.mutant import Mutant
from tests.mutants.trial import Trial

preload()
TEST = "tests/sharding/test_layout.py::test_layouts_are_values"
HEAD, TAIL = "class ShardLayout:", "def _round_up("
FILE = "sharding/layout.py"
CHANGES = (HEAD, HEAD + "  # a comment"), (TAIL, "raise SystemExit\\n" + TAIL), (TAIL, "1 / 0\\n" + TAIL)
for before, after in CHANGES:
    print(bool(Trial([TEST], Mutant("", FILE, "", before, after), limit_s=60).result().failed))
HANG = "while True:\\n    pass\\n\\n\\n" + TAIL
print(Trial([TEST], Mutant("", FILE, "", TAIL, HANG), limit_s=1).result().why)
print("shardgrad" in sys.modules)
"""


def test_a_change_of_nothing_is_not_noticed_and_one_that_breaks_hangs_or_kills_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONTROL], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.split("\n")[:-1] == [
        "False",
        "True",
        "True",
        "died, or did not end in time",
        "False",
    ], done.stderr
