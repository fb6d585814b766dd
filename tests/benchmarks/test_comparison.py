"""Comparisons in which engines fail: the rest goes on, and every failure is a row with its
reason.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.engines.catalogue import ENGINES
from benchmarks.engines.comparison import Disagreement, Outcome, compare, disagreement
from benchmarks.engines.summary import summarize
from benchmarks.engines.task import Length, Task

pytestmark = pytest.mark.timeout(300)  # the first comparison waits for an import of torch

FAKES = "tests.benchmarks.fake_engines:FakeEngine"
LENGTH = Length(rounds=4, steps=1, warmup=5)
TASK = Task()


def compared(*names: str, folder: Path, length: Length = LENGTH) -> Outcome:
    return compare(TASK, length, names, folder, lambda words: None, serves=FAKES)


def test_every_engine_that_fails_becomes_a_row_with_its_reason_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = dataclasses.replace(ENGINES["deepspeed-2"], package="no_such_package")
    present = dataclasses.replace(ENGINES["deepspeed-3"], package=None)
    for entry, name in ((absent, "deepspeed-2"), (present, "deepspeed-3")):
        monkeypatch.setitem(ENGINES, name, entry)  # type: ignore[arg-type]
    fails = {
        "shardgrad-keep": "rank 1 was ended by SIGSEGV (turn), round 2",
        "fsdp2-keep": "rank 1: KeyError: 'weight', round 2",  # the cause, not what its peer felt
        "fsdp2-compiled": "its loss of step 3 is 1, that of fsdp2 is 0.5",
        "deepspeed-2": "not installed: pip install deepspeed",
        "deepspeed-3": "rank 0: ValueError: stage 3 does not like this model",
        "hand-graphed": "needs a CUDA device",
    }
    outcome = compared("fsdp2", *fails, "shardgrad", "collectives", folder=tmp_path)
    assert outcome.left_out.keys() == fails.keys()
    for name, reason in fails.items():
        assert outcome.left_out[name].startswith(reason)
    assert outcome.disagreed == ["fsdp2-compiled"]
    # It broke while it was observed, and keeps its times.
    assert outcome.unobserved == {"collectives": "rank 0 was ended by SIGABRT (observe)"}
    measured = {name: len(of.costs) for name, of in outcome.measured.items()}
    assert measured == {"fsdp2": 4, "shardgrad": 4, "collectives": 4}
    summary = summarize(outcome, TASK)
    assert summary["collectives"]["ratio_to_base"]["median"] == pytest.approx(0.75)


def test_an_engine_that_hangs_is_ended_after_the_time_limit(tmp_path: Path) -> None:
    short = dataclasses.replace(LENGTH, answer_s=4.0)
    outcome = compared("fsdp2", "ddp", "shardgrad", folder=tmp_path, length=short)
    assert outcome.left_out["ddp"] == "rank 0, 1 did not answer within 4 s (turn), round 2"
    assert set(outcome.measured) == {"fsdp2", "shardgrad"}


@pytest.mark.parametrize(
    ("precision", "error"), [("fp32", 1e-7), ("bf16", 2e-2), ("bf16", float("nan"))]
)
def test_losses_that_differ_by_more_than_roundings_are_refused(
    precision: str, error: float
) -> None:
    with pytest.raises(Disagreement, match="loss of step 1"):
        disagreement("shardgrad", [2.0, 1.0 + error], [2.0, 1.0], Task(precision=precision))
