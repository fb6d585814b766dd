"""What a rank reports when it cannot go on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.errors import CheckpointError, CollectiveError
from shardgrad.programs.train import rank
from shardgrad.programs.train.failure import UsageError, explain

GONE = CollectiveError("the all-gather of layers.1 failed", got="Connection closed by peer")


def told(error: Exception, number: int) -> str:
    """What a rank tells, of a run without a checkpoint."""
    return rank._report(error, explain(error), number, Path("none"))


def test_two_ranks_tell_where_they_waited_for_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which one may be the lost one; of a thousand ranks not all have to say the same."""
    monkeypatch.setattr(recorder, "unit", "layers.1")
    recorder.enter("forward", step=5)
    for number in (0, 1):
        assert told(GONE, number).startswith(
            f"Rank {number} failed at step 5, forward of layers.1: Another rank exited, or did not "
            "respond within --timeout (the all-gather of layers.1 failed"
        )
    assert told(GONE, 2) == ""


def test_an_error_of_one_rank_is_its_own_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "unit", "layers.1")
    recorder.enter("forward", step=5)
    sentence = told(ValueError("a mistake"), 7)
    assert sentence.startswith(
        "Rank 7 failed at step 5, forward of layers.1: ValueError: a mistake"
    )
    assert sentence.endswith("There is no checkpoint: start the run again, with another --run-dir.")


def test_a_save_that_failed_on_another_rank_is_that_ranks_report() -> None:
    shared, own = (CheckpointError("a rank failed in its part") for _ in range(2))
    own.__cause__ = OSError(errno.EFBIG, "File too large")
    recorder.enter("checkpoint")
    assert told(shared, 0) == ""
    assert "checkpoint: The disk is full or a quota is exceeded" in told(own, 1)


def test_what_all_ranks_find_together_is_said_by_rank_0() -> None:
    error = UsageError("not possible")
    assert [told(error, number) for number in (0, 1)] == [str(error), ""]
