"""What a rank reports when it cannot go on, and leaves in the run folder."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from shardgrad.diagnosis.flight_recorder import FlightRecorder, recorder
from shardgrad.diagnosis.rank_status import Diagnosis, RankStatus, rank_status
from shardgrad.diagnosis.watchdog import Watchdog
from shardgrad.errors import CheckpointSaveError, CollectiveError
from shardgrad.programs.train import rank
from shardgrad.programs.train.failure import UsageError, explain

GONE = CollectiveError("the all-gather of layers.1 failed", got="Connection closed by peer")


class Answers:
    """A watchdog that has been told what happened."""

    def __init__(self, *culprits: int, witnesses: tuple[int, ...]) -> None:
        found = f"Rank {culprits[0]} does not answer."
        self.finding = Diagnosis(culprits, found, f"Ranks {witnesses} were waiting for it.")
        self.answers = {witness: status_of(witness) for witness in witnesses}
        self.told: list[BaseException] = []

    def query_ranks(self, *, timeout_s: float) -> tuple[Diagnosis, dict[int, RankStatus]]:
        return self.finding, self.answers

    def end(self, error: BaseException | None) -> None:
        assert error is not None
        self.told.append(error)


def status_of(number: int) -> RankStatus:
    return rank_status(FlightRecorder(), number, thread=threading.get_ident(), error=None)


def told(error: Exception, number: int, folder: Path, watchdog: Any) -> list[str]:
    return rank._report(error, explain(error), number, folder, cast(Watchdog | None, watchdog))


def test_the_first_witness_of_a_lost_rank_tells_it_and_keeps_what_all_have_said(
    tmp_path: Path,
) -> None:
    watchdog = Answers(1, witnesses=(0, 2))
    assert told(GONE, 2, tmp_path, watchdog) == []
    assert not list(tmp_path.iterdir())
    (sentence,) = told(GONE, 0, tmp_path, watchdog)
    assert sentence.startswith("Rank 1 does not answer. Ranks (0, 2) were waiting for it.")
    kept = json.loads((tmp_path / rank.RANK_STATUS).read_text())
    assert kept["finding"]["culprits"] == [1]
    assert [status["rank"] for status in kept["ranks"]] == [0, 2]


def test_an_error_of_one_rank_is_its_own_report_and_is_told_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "unit", "layers.1")
    recorder.enter("forward", step=5)
    watchdog, error = Answers(1, witnesses=(0,)), ValueError("a mistake")
    (sentence,) = told(error, 0, tmp_path, watchdog)
    assert sentence.startswith(
        "Rank 0 failed at step 5, forward of layers.1: ValueError: a mistake"
    )
    assert watchdog.told == [error]


def test_a_save_that_failed_on_another_rank_is_that_ranks_report(tmp_path: Path) -> None:
    shared, own = (CheckpointSaveError("a rank could not do its part") for _ in range(2))
    own.__cause__ = OSError(errno.EFBIG, "File too large")
    watchdog = Answers(1, witnesses=(0,))
    recorder.enter("checkpoint")
    assert told(shared, 0, tmp_path, watchdog) == []
    (sentence,) = told(own, 1, tmp_path, watchdog)
    assert "checkpoint: The disk is full or a quota is used up" in sentence


def test_what_all_ranks_find_together_is_said_by_rank_0(tmp_path: Path) -> None:
    error = UsageError("not possible")
    watchdog = Answers(1, witnesses=(0,))
    assert [told(error, number, tmp_path, watchdog) for number in (0, 1)] == [[str(error)], []]


def test_a_rank_that_has_not_met_the_others_speaks_for_itself(tmp_path: Path) -> None:
    assert told(UsageError("no such device"), 1, tmp_path, None) == ["no such device"]
