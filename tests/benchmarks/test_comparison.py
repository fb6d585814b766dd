"""Comparisons in which engines fail: the rest goes on, and every failure is a row with its
reason.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.engines.catalogue import ENGINES, lack_of_memory, least_nbytes
from benchmarks.engines.comparison import Disagreement, Outcome, compare, disagreement
from benchmarks.engines.summary import noise, summarise
from benchmarks.engines.task import Length, Task, check
from benchmarks.workers import share_of_cores
from shardgrad.train.failure import UsageError

pytestmark = pytest.mark.timeout(300)  # the first comparison waits for an import of torch

FAKES = "tests.benchmarks.fake_engines:FakeEngine"
LENGTH = Length(rounds=4, steps=1, warmup=5)
TASK = Task()


def compared(*names: str, folder: Path, length: Length = LENGTH, task: Task = TASK) -> Outcome:
    return compare(task, length, names, folder, lambda words: None, serves=FAKES)


def test_an_engine_that_crashes_between_rounds_becomes_a_row_with_its_signal(
    tmp_path: Path,
) -> None:
    outcome = compared("fsdp2", "fsdp1", "shardgrad", folder=tmp_path)
    assert "rank 1 was ended by SIGSEGV" in outcome.left_out["fsdp1"]
    assert "round 2" in outcome.left_out["fsdp1"]
    assert {name: len(of.costs) for name, of in outcome.measured.items()} == {
        "fsdp2": 4,
        "shardgrad": 4,
    }


def test_an_engine_that_hangs_is_ended_after_the_time_limit(tmp_path: Path) -> None:
    short = dataclasses.replace(LENGTH, answer_s=4.0)
    outcome = compared("fsdp2", "ddp", "shardgrad", folder=tmp_path, length=short)
    assert outcome.left_out["ddp"] == "rank 0, 1 did not answer within 4 s (turn), round 2"
    assert set(outcome.measured) == {"fsdp2", "shardgrad"}


def test_the_cause_is_told_and_not_what_its_peer_felt(tmp_path: Path) -> None:
    outcome = compared("fsdp2", "fsdp2-keep", folder=tmp_path)
    assert outcome.left_out["fsdp2-keep"] == "rank 1: KeyError: 'weight', round 2"


def test_an_engine_that_breaks_while_it_is_observed_keeps_its_times(tmp_path: Path) -> None:
    outcome = compared("fsdp2", "collectives", folder=tmp_path)
    assert outcome.unobserved == {"collectives": "rank 0 was ended by SIGABRT (observe)"}
    assert summarise(outcome, TASK)["collectives"]["ratio_to_base"]["median"] == pytest.approx(0.75)


def test_no_engine_is_started_when_half_of_the_time_is_over(tmp_path: Path) -> None:
    hurried = dataclasses.replace(LENGTH, limit_s=1e-3)
    outcome = compared("fsdp2", "shardgrad", "compute", folder=tmp_path, length=hurried)
    assert "no time left" in outcome.left_out["compute"]
    assert outcome.measured["shardgrad"].rounds == [0, 1]  # what a median needs


def test_an_engine_that_cannot_be_built_and_one_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = dataclasses.replace(ENGINES["deepspeed-2"], package="no_such_package")
    present = dataclasses.replace(ENGINES["deepspeed-3"], package=None)
    for entry, name in ((absent, "deepspeed-2"), (present, "deepspeed-3")):
        monkeypatch.setitem(ENGINES, name, entry)  # type: ignore[arg-type]
    outcome = compared("fsdp2", "deepspeed-2", "deepspeed-3", "hand-graphed", folder=tmp_path)
    assert outcome.left_out == {
        "deepspeed-2": "not installed: pip install deepspeed",
        "deepspeed-3": "rank 0: ValueError: stage 3 does not like this model",
        "hand-graphed": "needs a CUDA device",
    }
    assert set(outcome.measured) == {"fsdp2"}


def test_losses_that_differ_keep_an_engine_out(tmp_path: Path) -> None:
    outcome = compared("fsdp2", "unsharded", folder=tmp_path)
    assert outcome.disagreed == ["unsharded"]
    assert "its loss of step 3 is 1, that of fsdp2 is 0.5" in outcome.left_out["unsharded"]


def test_an_engine_that_does_not_fit_with_the_others_is_measured_with_the_base_later(
    tmp_path: Path,
) -> None:
    outcome = compared("fsdp2", "shardgrad", "zero-redundancy", "compute", folder=tmp_path)
    assert not outcome.left_out
    assert outcome.measured["fsdp2"].rounds == [*range(8)]
    assert (
        outcome.measured["zero-redundancy"].rounds
        == outcome.measured["compute"].rounds
        == [4, 5, 6, 7]
    )
    summary = summarise(outcome, TASK)
    # The base slows down from turn to turn; only ratios within a round are told.
    assert summary["shardgrad"]["ratio_to_base"]["median"] == pytest.approx(0.5)
    base, later = outcome.measured["fsdp2"].costs[4:], outcome.measured["zero-redundancy"].costs
    expected = sorted(b.wall_s / a.wall_s for a, b in zip(base, later, strict=True))
    assert summary["zero-redundancy"]["ratio_to_base"]["median"] == pytest.approx(
        sum(expected[1:3]) / 2
    )


def test_without_its_base_a_comparison_still_has_times(tmp_path: Path) -> None:
    outcome = compared("shardgrad", "compute", folder=tmp_path)
    summary = summarise(outcome, TASK)
    assert "ratio_to_base" not in summary["shardgrad"]
    assert summary["shardgrad"]["beyond_compute_s"]["median"] == pytest.approx(0.1, rel=0.05)
    assert summary["shardgrad"]["tokens_per_s"] == pytest.approx(2 * 8 * 128 / 0.205, rel=0.01)
    assert summary["shardgrad"]["peak_rss_beyond_imports_nbytes"] == 201  # the heavier rank
    assert all(part < 0.1 for part in noise(summary).values())


def test_quartiles_far_from_the_median_are_noise() -> None:
    quiet, loud = ({"wall_s": {"median": 1.0, "quartiles": [low, 1.05]}} for low in (0.95, 0.85))
    assert noise({"quiet": quiet, "loud": loud}) == pytest.approx({"quiet": 0.05, "loud": 0.15})


@pytest.mark.parametrize(
    ("name", "precision", "ranks", "error", "allowed"),
    [
        ("shardgrad", "fp32", 2, 1e-7, False),
        ("shardgrad", "fp32", 4, 1e-7, True),
        ("ddp", "fp32", 2, 5e-5, True),
        ("ddp", "fp32", 2, 2e-4, False),
        ("shardgrad", "bf16", 2, 0.01, True),
        ("shardgrad", "bf16", 2, 0.03, False),
        ("shardgrad", "bf16", 2, float("nan"), False),
    ],
)
def test_how_far_losses_may_differ(
    name: str, precision: str, ranks: int, error: float, allowed: bool
) -> None:
    task = Task(precision=precision, ranks=ranks)
    losses = [2.0, 1.0 + error]
    if allowed:
        assert disagreement(name, losses, [2.0, 1.0], task) == pytest.approx(error)
    else:
        with pytest.raises(Disagreement, match="loss of step 1"):
            disagreement(name, losses, [2.0, 1.0], task)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "tinny"}, "did you mean 'tiny'"),
        ({"mesh": "2x2"}, "has room for 4 ranks, not 2: use --ranks 4"),
        ({"precision": "fp8"}, "no precision 'fp8'"),
        ({"device": "cuda", "ranks": 1000}, "1000 ranks need as many GPUs, and .* use --"),
        (
            {"preset": "wide-moe", "seq_len": 17, "batch_size": 1},
            "cannot be shared evenly by 16 experts",
        ),
    ],
)
def test_impossible_tasks_are_refused_in_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(dataclasses.replace(TASK, **changes))  # type: ignore[arg-type]


def test_a_model_larger_than_the_machine_is_not_tried() -> None:
    huge = Task(preset="8b", ranks=1000)
    assert "out of memory: it needs at least" in str(lack_of_memory("ddp", huge))
    assert lack_of_memory("ddp", TASK) is None
    assert least_nbytes("shardgrad", Task(preset="8b", ranks=8)) == least_nbytes(
        "unsharded", Task(preset="8b")
    )


def test_a_mesh_of_replicas_keeps_out_engines_that_know_none(tmp_path: Path) -> None:
    task = Task(ranks=4, mesh="2x2")
    outcome = compared("fsdp2", "megatron-fsdp", "deepspeed-1", folder=tmp_path, task=task)
    assert set(outcome.left_out) == {"megatron-fsdp", "deepspeed-1"}


def test_ranks_near_one_gpu_or_node_share_its_cores_and_others_leave_theirs_alone() -> None:
    nodes = [[0, 1, 2, 3, 4], [8, 9]]
    near = [nodes[0], nodes[1], nodes[0]]
    assert [share_of_cores(near, rank) for rank in range(3)] == [[0, 1], [8, 9], [2, 3]]
    too_few = [nodes[1]] * 3
    assert [share_of_cores(too_few, rank) for rank in range(3)] == too_few
