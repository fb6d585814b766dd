"""The judge of the drills rejects every report that names the wrong rank, step or location."""

from __future__ import annotations

import threading

import pytest
import torch

from shardgrad.diagnosis.flight_recorder import FlightRecorder, GroupLog
from shardgrad.diagnosis.rank_status import RankStatus, rank_status
from tests.drills.injector import Trace
from tests.drills.reports import Report, reports_in

COLLECTIVES = [f"all-gather of layers.{i}" for i in range(20)]
TRACE = Trace(1, 0.0, 5, "forward", "layers.9", (), {"world": 10}, 4711)
KILLED = "Rank 1 was ended by SIGKILL."
HINT = "The newest checkpoint is step_000004; resume with: shardgrad train --resume runs/tiny"


def waiting(rank: int, number: int) -> RankStatus:
    """A rank that waits in the collective of this number, of three ranks."""
    recorder = FlightRecorder()
    recorder.enter("forward", step=5)
    line = GroupLog(recorder, "world", (0, 1, 2))
    recorder._logs = {line: line}  # type: ignore[assignment]
    for what in COLLECTIVES[:number]:
        recorder.waits_in = line, line.record(what, torch.zeros(2))
    return rank_status(recorder, rank, thread=threading.get_ident(), error=None)


def waits(number: int, *, step: int = 5) -> str:
    return f"Ranks 0 and 2 were waiting for it in the all-gather of layers.{number - 1}, step {step}, forward."


@pytest.mark.parametrize(
    "sentence",
    [
        f"{KILLED} {waits(11)}",
        f"Rank 1 does not answer: it ended, or was stopped or cut off. {waits(11, step=4)}",
        f"Rank 1 failed at step 5, forward of layers.9: ValueError: no {waits(11)}",
        f"Rank 1 failed at step 5, forward of layers.9 (ValueError: no). {waits(11)}",
        f"Rank 1 is late, at step 5, forward of layers.9, in model.py:7 in forward. {waits(11)}",
        "Rank 1 left the common order at step 5: the all-gather of head (2 x float) where ranks 0 "
        "and 2 made "
        "the all-gather of layers.10 (2 x float) (number 11 of their group).",
        "Replicas have drifted apart, found after step 6: parameter head.weight differs between "
        "the replicas "
        "on ranks 0 and 1.",
        "The loss or the gradients stopped being finite at step 5: the loss of rank 1.",
    ],
)
def test_a_true_report_is_believed(sentence: str) -> None:
    assert Report(sentence, [waiting(0, 11), waiting(2, 11)]).wrong_claims(TRACE) == []


@pytest.mark.parametrize(
    ("sentence", "wrong_claim"),
    [
        (
            f"Rank 0 was ended by SIGKILL. {waits(11)} Rank 1 was at step 5.",
            "does not accuse rank 1",
        ),
        (f"Ranks 1 and 2 do not answer. {waits(11)}", "rank 1 alone"),
        (f"Rank 1: Another rank ended. {waits(11)}", "does not accuse rank 1"),
        (f"{KILLED} {waits(11, step=8)}", "step 5"),
        (f"{KILLED} Rank 0 was at step 5, forward.", "does not name the collective"),
        (f"{KILLED} {waits(9)}", "does not name the collective"),
        (
            "Rank 1 failed at step 5, forward of layers.8: ValueError: no",
            "at step 5, forward of layers.9",
        ),
        (
            "Rank 1 is late, at step 5, forward of layers.99, in x.py:7",
            "at step 5, forward of layers.9",
        ),
        (
            "Rank 1 left the common order at step 5: the A where rank 0 made the B (number 3 of "
            "their group)",
            "another place in the order",
        ),
    ],
)
def test_a_report_that_is_wrong_in_one_thing_is_not_believed(
    sentence: str, wrong_claim: str
) -> None:
    (found,) = Report(sentence, [waiting(0, 11), waiting(2, 11)]).wrong_claims(TRACE)
    assert wrong_claim in found


def test_a_rank_cannot_wait_for_the_faulty_rank_in_a_collective_that_it_has_passed() -> None:
    (found,) = Report(f"{KILLED} {waits(4)}", [waiting(0, 4), waiting(2, 4)]).wrong_claims(TRACE)
    assert "a rank waits in all-gather of layers.3" in found


def test_a_report_without_a_faulty_rank_has_to_name_a_location() -> None:
    said = "The store is gone. Rank 0 was in the all-gather of layers.1, step 5, forward."
    assert Report(said).missing_claims(TRACE) == []
    assert len(Report("The store is gone.").missing_claims(TRACE)) == 2


def test_reports_are_told_from_remarks() -> None:
    words = f"a warning\nshardgrad train: Rank 0 is late.\nshardgrad train: {KILLED} {HINT}\n"
    assert [report.sentence for report in reports_in(words, [])] == [f"{KILLED} {HINT}"]
