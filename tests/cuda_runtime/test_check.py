"""The check for programs of others: silent for what is right, and not for what forgets to wait."""

from __future__ import annotations

import pytest

from tests.cuda_runtime.check import check

EXAMPLES = "tests.cuda_runtime.example"


def test_a_program_that_waits_is_right_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(f"{EXAMPLES}:train", 2, ("host", "late", "1")) == []
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("replays" in line for line in lines)


def test_a_program_that_forgets_to_wait_has_other_values_and_a_conflict() -> None:
    wrong = check(f"{EXAMPLES}:train_without_waiting", 1, ("host", "late"))
    assert "order late, rank 0: other values, so a wait is missing" in wrong
    assert any("aten::mul_" in each and "without an order" in each for each in wrong)
