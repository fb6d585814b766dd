"""`shardgrad doctor --audit`: a program with its engine and without, and what is said about
mistakes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardgrad.programs.audit.audit import _left, _pieces, _rank
from shardgrad.programs.audit.first_difference import (
    Piece,
    Trace,
    first_difference,
    last_difference,
)
from tests.support.processes import CONTEXT
from tests.support.programs import run

PROGRAMS = "tests.audit.audited"


def audited(name: str, *options: str) -> tuple[int, str]:
    done = run("shardgrad", "doctor", "--audit", f"{PROGRAMS}:{name}", *options, forks=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "seeded_by_rank",
            "initial value of 0.weight, and 3 more: what rank 1 holds of it is not right, the rest "
            "is",
        ),
        ("unused_on_rank_1", "step 0, gradient of 1.weight, and 1 more: rank 1 has none"),
        ("another_model_on_rank_1", "runs without its engine, and fails with it: rank"),
    ],
)
def test_a_mistake_is_named_with_its_first_parameter(name: str, words: str) -> None:
    status, said = audited(name)
    assert words in said
    assert status == 1


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "shardgrad"])
def test_a_program_that_trains_by_itself_passes_with_any_engine(engine: str) -> None:
    status, said = audited(f"trains_with_{engine}")
    assert "2 ranks end as they do without an engine: 4 values agree." in said
    assert status == 0


def test_values_that_a_program_returns_are_compared() -> None:
    status, said = audited("trains_and_returns_losses")
    assert "2 ranks end as they do without an engine: 1 values agree." in said
    assert status == 0


def test_a_program_that_trains_something_else_with_its_engine_is_found() -> None:
    status, said = audited("trains_past_the_wrapper")
    assert "do not end as they do without an engine. First in step 0, gradient of 0.weight" in said
    assert ", and 3 more: every rank has its own" in said
    assert status == 1


def test_a_program_that_cannot_do_without_its_engine_says_so() -> None:
    status, said = audited("needs_its_engine")
    assert "the program fails without its engine" in said
    assert "has no attribute 'to_local'" in said
    assert status == 2


def test_a_rank_has_the_environment_of_a_launcher(tmp_path: Path) -> None:
    target = f"{PROGRAMS}:with_the_environment_of_a_launcher"
    process = CONTEXT.Process(target=_rank, args=(target, 0, 1, str(tmp_path), True))
    process.start()
    process.join()
    assert isinstance(_left(tmp_path, 0, process.exitcode), Trace)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing", ["--audit nothing is not module:function", "try:      --audit train:build"]),
        ("no.such.module:build", ["importing no.such.module failed", "ModuleNotFoundError"]),
        (f"{PROGRAMS}:absent", ["has no function absent", "got:      nothing of that name"]),
        (f"{PROGRAMS}:a_number", ["has no function a_number", "got:      of type int"]),
        (
            f"{PROGRAMS}:batch",
            ["batch: the function is called without arguments", "got:      batch(index: 'int'"],
        ),
        (
            f"{PROGRAMS}:returns_a_tuple",
            ["returned tuple", "the program fails without its engine", "return model"],
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


# -- what the numbers say

WEIGHT = torch.arange(1.0, 7.0).view(3, 2)
GRADIENT = torch.tensor([[1.0, -2.0], [3.0, 0.5], [-1.0, 2.0]])


def whole(values: torch.Tensor | None) -> Piece | None:
    return None if values is None else Piece(values, tuple(values.shape), (0,) * values.dim())


def trace(*gradients: torch.Tensor | None, weights: list[torch.Tensor] | None = None) -> Trace:
    weights = weights or [WEIGHT - (step + 1) * GRADIENT for step in range(len(gradients))]
    return Trace(
        {"w": whole(WEIGHT)},
        [{"w": whole(each)} for each in gradients],
        [{"w": whole(each)} for each in weights],
    )


def rows(values: torch.Tensor, start: int, stop: int) -> Piece:
    return Piece(values[start:stop], tuple(values.shape), (start, 0))


def said(reference: Trace, *ranks: Trace) -> str:
    return str(first_difference(reference, ranks))


def test_rounding_is_not_a_difference() -> None:
    assert first_difference(trace(GRADIENT), [trace(GRADIENT * (1 + 1e-6))] * 2) is None


def test_a_gradient_that_is_not_finite_anywhere_is_no_difference() -> None:
    broken = GRADIENT / torch.zeros(())
    assert first_difference(trace(broken), [trace(broken)] * 2) is None


def test_factors_are_recognized() -> None:
    assert "gradient of w: it is 0.5 times the expected one" in said(
        trace(GRADIENT), *[trace(GRADIENT / 2)] * 2
    )
    assert "it is zero on all ranks" in said(trace(GRADIENT), *[trace(GRADIENT * 0)] * 2)
    other = GRADIENT + GRADIENT.norm() * torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert "it is off by 100.00%, on all ranks" in said(trace(GRADIENT), *[trace(other)] * 2)


def test_the_rank_whose_rows_are_wrong_is_named() -> None:
    reference = trace(GRADIENT)
    ranks = [
        Trace(
            {"w": rows(WEIGHT, *own)},
            [{"w": rows(values, *own)}],
            [{"w": rows(WEIGHT - GRADIENT, *own)}],
        )
        for own, values in (((0, 2), GRADIENT), ((2, 3), GRADIENT.flip(1)))
    ]
    assert "what rank 1 holds of it is not right, the rest is" in said(reference, *ranks)


def test_sparse_gradients_are_noted_and_freed_parameters_are_not() -> None:
    freed = WEIGHT.clone()
    freed.untyped_storage().resize_(0)
    noted = _pieces({"sparse": GRADIENT.to_sparse(), "freed": freed})
    assert noted["freed"] is None
    assert noted["sparse"] is not None
    assert torch.equal(noted["sparse"].values, GRADIENT)


def test_the_end_is_told_where_optimizers_have_seen_other_tensors() -> None:
    flat = torch.zeros(3)
    runs = [
        Trace(parameters=[{"p": whole(values)}], returned={"w": whole(end)})
        for values, end in ((WEIGHT, WEIGHT), (flat, 2 * WEIGHT))
    ]
    assert str(last_difference(runs[0], runs[1:])).startswith(
        "end of w: it is 2 times the expected"
    )


def test_updates_are_compared_where_gradients_agree() -> None:
    reference, twice = trace(GRADIENT), trace(GRADIENT, weights=[WEIGHT - 2 * GRADIENT])
    assert said(reference, twice, twice) == (
        "step 0, update of w: it is 2 times the expected one, on all ranks"
    )
    kept = trace(GRADIENT, weights=[WEIGHT])
    assert "step 0, update of w: it is zero on all ranks" in said(reference, kept, kept)
    assert "every rank has its own" in said(reference, reference, kept)
