"""`shardgrad doctor --audit`: a program with its engine and without, and what is said about
mistakes.
"""

from __future__ import annotations

import math

import pytest
import torch

from shardgrad.programs.audit import audit
from shardgrad.programs.audit.audit import _difference, _run
from tests.support.programs import run

PROGRAMS = "tests.audit.audited"


def audited(name: str, *options: str) -> tuple[int, str]:
    done = run("shardgrad", "doctor", "--audit", f"{PROGRAMS}:{name}", *options, forks=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("seeded_by_rank", "First difference: 0.weight, and 3 more: it is off by "),
        ("unused_on_rank_1", "First difference: 0.weight, and 3 more: it is off by "),
        ("another_model_on_rank_1", "runs without its engine but fails with it: rank"),
    ],
)
def test_a_mistake_is_named_with_its_first_parameter(name: str, words: str) -> None:
    status, said = audited(name)
    assert words in said
    assert status == 1


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "shardgrad"])
def test_a_program_that_trains_by_itself_passes_with_any_engine(engine: str) -> None:
    status, said = audited(f"trains_with_{engine}")
    assert "2 ranks reproduce the run without an engine: 4 values agree." in said
    assert status == 0


def test_values_that_a_program_returns_are_compared() -> None:
    status, said = audited("trains_and_returns_losses")
    assert "2 ranks reproduce the run without an engine: 10 values agree." in said
    assert status == 0


def test_a_program_that_trains_something_else_with_its_engine_is_found() -> None:
    status, said = audited("trains_past_the_wrapper")
    assert (
        "do not reproduce the run without an engine. First difference: 0.weight, and 3 more" in said
    )
    assert "and ranks have different values, as when gradients are not averaged." in said
    assert status == 1


def test_a_program_that_cannot_do_without_its_engine_says_so() -> None:
    status, said = audited("needs_its_engine")
    assert "the program fails without its engine" in said
    assert "has no attribute 'to_local'" in said
    assert "Terminating process" not in said
    assert status == 2


def test_a_rank_has_the_environment_of_a_launcher() -> None:
    left, failure = _run(f"{PROGRAMS}:with_the_environment_of_a_launcher", 1)
    assert not failure
    assert len(left) == 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing", ["--audit nothing does not name", "try:      --audit train:build"]),
        (
            "no.such.module:build",
            ["does not name a function without arguments", "ModuleNotFoundError"],
        ),
        (f"{PROGRAMS}:absent", ["has no attribute 'absent'"]),
        (f"{PROGRAMS}:a_number", ["got:      TypeError: 7 is not a callable object"]),
        (
            f"{PROGRAMS}:batch",
            ["expected: module:function", "missing a required argument: 'index'"],
        ),
        (
            f"{PROGRAMS}:returns_a_list",
            ["got:      list losses", "return model"],
        ),
        (
            f"{PROGRAMS}:broken",
            ["fails without its engine", "FileNotFoundError: data.bin", "where:    broken()"],
        ),
    ],
)
def test_what_is_not_such_a_program_is_refused(target: str, words: list[str]) -> None:
    done = run("shardgrad", "doctor", "--audit", target, forks=True)
    for word in words:
        assert word in done.stderr
    assert ("Traceback" in done.stderr) == target.endswith("broken"), "only of the program's errors"
    assert done.returncode == 2


def test_a_rank_that_does_not_end_after_another_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "_TIMEOUT_S", 3.0)
    left, failure = _run(f"{PROGRAMS}:rank_1_stays", 2)
    assert not left
    assert failure.endswith("rank_1_stays(): 1 of 2 ranks still waited after the others ended")


# -- what the numbers say

WEIGHT = torch.arange(1.0, 7.0).view(3, 2)


def said(*ranks: torch.Tensor, expected: torch.Tensor = WEIGHT) -> str:
    return _difference([{"w": expected}] * len(ranks), [{"w": values} for values in ranks])


def test_rounding_is_not_a_difference() -> None:
    assert said(WEIGHT * (1 + 1e-6), WEIGHT) == ""
    assert said(WEIGHT * (1 + 1e-3), WEIGHT) != ""


def test_only_what_is_not_finite_in_either_run_is_no_difference() -> None:
    for broken in (WEIGHT / 0, WEIGHT.masked_fill(WEIGHT == 2, math.nan)):
        assert said(broken, broken, expected=broken) == ""
        assert said(WEIGHT, WEIGHT, expected=broken) != ""
        for ranks in ((WEIGHT, broken), (broken, WEIGHT), (broken, broken)):
            assert said(*ranks).startswith("w: it is zero or not finite in one of the runs")


def test_the_first_value_that_differs_is_told_with_how_far_and_where() -> None:
    alike = "w: it is off by 100.00%, equally on all ranks"
    assert said(2 * WEIGHT, 2 * WEIGHT) == alike
    for second in (WEIGHT, 0 * WEIGHT):  # right; or as far off, on the other side
        assert said(2 * WEIGHT, second).startswith("w: it is off by 100.00%, and ranks have")
    zero = "w: it is zero or not finite in one of the runs, equally on all ranks"
    assert said(WEIGHT, WEIGHT, expected=0 * WEIGHT) == zero
    assert said(WEIGHT[:2], WEIGHT[:2]) == "w: it has shape (2, 2) instead of (3, 2)"
    more = {"v": WEIGHT, "w": WEIGHT, "x": WEIGHT}
    other = {"v": WEIGHT, "w": 2 * WEIGHT, "x": 2 * WEIGHT}
    assert _difference([more], [other]) == alike.replace("w:", "w, and 1 more:")
    assert _difference([more], [{}]).endswith("it does not exist on every rank in both runs")
    assert _difference([more, {}], []).startswith("the order")
