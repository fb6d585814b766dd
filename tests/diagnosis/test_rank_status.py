"""What follows from what ranks say of themselves, without ranks; tests/mistakes has the sentence of
each mistake on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from traceback import FrameSummary

from shardgrad.diagnosis.flight_recorder import FlightRecorder, GroupLog
from shardgrad.diagnosis.rank_status import RankStatus, diagnose, rank_status

UNITS = ["all-gather of layers.0", "all-gather of layers.1", "reduce-scatter of layers.1"]


def rank_that_began(
    whats: Sequence[str], *, of: int = 3, waits: bool = True, step: int = 412
) -> FlightRecorder:
    """The recorder of a rank in one group of `of` ranks."""
    recorder = FlightRecorder()
    recorder.enter("forward", step=step)
    line = GroupLog(recorder, tuple(range(of)))
    for what in whats:
        entry = line.record(what)
        recorder.waits_in = entry if waits else None
    return recorder


def test_of_ranks_that_are_silent_or_late_or_in_one_collective_nothing_follows() -> None:
    heard = {rank: rank_status(rank_that_began(UNITS), rank) for rank in (0, 2)}
    assert diagnose(heard, 3) is None
    heard[1] = rank_status(rank_that_began(UNITS[:2], waits=False), 1)
    assert diagnose(heard, 3) is None
    heard[1] = rank_status(rank_that_began(UNITS), 1)
    assert diagnose(heard, 3) is None


def test_ranks_that_wait_in_different_collectives_on_one_line_are_named_with_theirs() -> None:
    heard = {rank: rank_status(rank_that_began(UNITS), rank) for rank in range(3)}
    heard[1] = rank_status(rank_that_began([*UNITS[:2], "all-gather of head"]), 1)
    finding = diagnose(heard, 3)
    assert finding is not None
    assert finding.sentence == (
        "Ranks wait for each other in different collectives: rank 0 in the reduce-scatter of "
        "layers.1, step 412, forward; rank 1 in the all-gather of head, step 412, forward."
    )


def test_ranks_that_wait_in_one_collective_for_the_nth_time_are_named_if_n_differs() -> None:
    """Rank 1 has sent no gradients. Rank 3, which nobody waits for, goes on."""
    heard = {rank: rank_status(rank_that_began([*UNITS, UNITS[0]]), rank) for rank in range(3)}
    heard[1] = rank_status(rank_that_began([*UNITS[:2], UNITS[0]]), 1)
    finding = diagnose(heard, 4)
    assert finding is not None
    assert finding.sentence == (
        "Ranks wait for each other in different collectives: rank 0 in the all-gather of layers.0, "
        "step 412, forward, its number 4; rank 1 in the all-gather of layers.0, step 412, forward, "
        "its number 3."
    )


def test_a_failure_comes_before_its_consequences() -> None:
    heard = {rank: rank_status(rank_that_began(UNITS), rank) for rank in (0, 2)}
    failed = rank_that_began(UNITS[:1])
    failed.report(ValueError("no"))
    heard[1] = rank_status(failed, 1)
    finding = diagnose(heard, 4)  # rank 3 is silent
    assert finding is not None
    assert finding.sentence.startswith(
        "Rank 1 failed at step 412, forward (ValueError: no). Ranks 0, 2"
    )


# -- programs that count no steps: what they have called, and what to type instead


TRAINS, LOADS = FrameSummary("/train.py", 30, "train"), FrameSummary("/data.py", 3, "sleep")


def waiting(
    rank: int, *calls: FrameSummary, whats: Sequence[str] = (), waits: str = "collective"
) -> RankStatus:
    """The status of a rank that waits in a collective of the engine, or else of torch."""
    recorder = rank_that_began(whats, of=2, waits=waits == "engine", step=0)
    return rank_status(recorder, rank, calls, waits=waits)


def library(function: str) -> FrameSummary:
    """A call of a library's function."""
    return FrameSummary("<library>", 1, function)


IN_FULL = waiting(0, library("full_tensor"), TRAINS)
IN_FORWARD = waiting(1, library("forward"), TRAINS, whats=UNITS[:1], waits="engine")


def test_nothing_is_said_while_a_rank_may_still_come() -> None:
    assert diagnose({0: IN_FULL, 1: IN_FORWARD}, 3) is None
    assert diagnose({0: IN_FULL, 1: replace(IN_FORWARD, waits=False)}, 2) is None
    assert diagnose({0: replace(IN_FORWARD, rank=0), 1: IN_FORWARD}, 2) is None
    ended = replace(waiting(0, waits=""), has_ended=True)
    assert diagnose({0: ended, 1: replace(IN_FORWARD, waits=False)}, 2) is None


def test_ranks_on_one_line_that_wait_for_the_device_differ_by_what_they_have_started() -> None:
    here = waiting(0, TRAINS, whats=UNITS, waits="device")
    there = waiting(1, TRAINS, whats=UNITS[:2], waits="device")
    found = diagnose({0: here, 1: there}, 2)
    assert found is not None
    assert found.sentence == (
        "Ranks wait for each other in different collectives: rank 0 in train at train.py:30, after "
        "the reduce-scatter of layers.1, number 3; rank 1 in train at train.py:30, after the "
        "all-gather of layers.1, number 2."
    )
    assert diagnose({0: here, 1: replace(here, rank=1)}, 2) is None
    assert diagnose({0: here, 1: waiting(1, LOADS, whats=UNITS[:2], waits="")}, 2) is None
