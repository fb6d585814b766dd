"""Programs that were silently wrong, hung or corrupted with some engine: with this one, right or
named.
"""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.records import ROOT
from tests.silent.cases import CASES, PROGRAMS
from tests.silent.engines import ENGINES
from tests.silent.judge import judged
from tests.silent.table import AUDITS, OURS, PAGE, about, newest_records, written

GOOD = ("right", "refused", "hangs, warned")


@pytest.fixture(scope="module")
def verdicts() -> Any:
    """Returns what tells the verdict on a program; all are started in order, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        started = {name: pool.submit(judged, name, OURS, set()) for name in PROGRAMS}
        yield lambda name: started[name].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wrong_or_hangs_without_a_word(verdicts: Any, name: str) -> None:
    found = verdicts(name)
    assert found["verdict"] in GOOD, found
    if found["verdict"] == "refused":
        assert len(found["message"]) > 40, "a message that says what to do"


def test_a_program_without_a_mistake_is_right_and_not_warned(verdicts: Any) -> None:
    found = verdicts("control")
    assert (found["verdict"], found.get("warned")) == ("right", None)


# -- programs, record and page


@pytest.mark.parametrize("name", CASES)
def test_a_program_has_at_most_forty_lines_and_a_report(name: str) -> None:
    assert len(inspect.getsource(CASES[name]).splitlines()) <= 40
    assert about(name)


def test_the_page_is_made_of_records_that_have_every_program() -> None:
    records = newest_records()
    assert list(records) == list(ENGINES)
    assert all(record["summary"].keys() == CASES.keys() for record in records.values())
    assert PAGE.read_text(encoding="utf-8") == written(records, newest_records(AUDITS)), (
        f"{PAGE.relative_to(ROOT)} is not what its records say: python -m tests.silent --page"
    )


def test_the_record_says_that_nothing_here_is_wrong_or_hangs_without_a_word() -> None:
    records = newest_records()
    assert {found["verdict"] for found in records[OURS]["summary"].values()} == set(GOOD)
    assert {found["verdict"] for found in records["torch"]["summary"].values()} == {"right"}


def test_audits_find_every_wrong_program_of_every_engine_and_pass_every_right_one() -> None:
    records, audits = newest_records(), newest_records(AUDITS)
    assert list(audits) == [engine for engine in ENGINES if engine != "torch"]
    for engine, audit in audits.items():
        verdicts = {name: each["verdict"] for name, each in records[engine]["summary"].items()}
        assert {name: each["passed"] for name, each in audit["summary"].items()} == {
            name: verdict == "right"
            for name, verdict in verdicts.items()
            if verdict.startswith(("right", "wrong"))
        }, engine
