"""Programs that were silently wrong, hung or corrupted with some engine: with this one, right or
named.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.records import ROOT
from tests.silent.engines import ENGINES
from tests.silent.judge import judged, names
from tests.silent.table import AUDITS, CASES, OURS, PAGE, case, newest_records, written

GOOD = ("right", "refused", "hangs, warned")
CONTROL = "control"


@pytest.fixture(scope="module")
def verdicts() -> Any:
    """Returns what tells the verdict on a program; all are started in order, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        started = {name: pool.submit(judged, name, OURS, set()) for name in [CONTROL, *CASES]}
        yield lambda name: started[name].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wrong_or_hangs_without_a_word(verdicts: Any, name: str) -> None:
    found = verdicts(name)
    assert found["verdict"] in GOOD, found
    if found["verdict"] == "refused":
        assert len(found["message"]) > 40, "a message that says what to do"


def test_a_program_without_a_mistake_is_right_and_not_warned(verdicts: Any) -> None:
    found = verdicts(CONTROL)
    assert (found["verdict"], found.get("warned")) == ("right", None)


# -- programs, record and page


def test_there_are_forty_programs_of_at_most_forty_lines_with_a_report_each() -> None:
    assert len(CASES) >= 40
    assert set(names()) == {CONTROL, *CASES}
    for name in CASES:
        assert len(case(name).source.splitlines()) <= 40, name
        assert case(name).reports, name
        assert case(name).right, name
        for url in case(name).reports:
            assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url), name


def test_records_have_every_program_and_the_page_is_made_of_them() -> None:
    records = newest_records()
    assert list(records) == list(ENGINES)
    for engine, record in records.items():
        assert sorted(record["summary"]) == CASES, engine
    assert PAGE.read_text(encoding="utf-8") == written(records, newest_records(AUDITS)), (
        f"{PAGE.relative_to(ROOT)} is not what its records say: python -m tests.silent --page"
    )


def test_the_record_says_that_nothing_here_is_wrong_or_hangs_without_a_word() -> None:
    records = newest_records()
    for name in CASES:
        assert records[OURS]["summary"][name]["verdict"] in GOOD, name
        assert records["torch"]["summary"][name]["verdict"] == "right", name


def test_audits_find_every_wrong_program_of_every_engine_and_pass_every_right_one() -> None:
    records = newest_records()
    audits = newest_records(AUDITS)
    assert list(audits) == [engine for engine in ENGINES if engine != "torch"]
    for engine, audit in audits.items():
        for name, found in records[engine]["summary"].items():
            if found["verdict"].startswith(("right", "wrong")):
                assert audit["summary"][name]["passed"] == (found["verdict"] == "right"), name
