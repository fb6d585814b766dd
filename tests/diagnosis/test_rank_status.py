"""What follows from what ranks say of themselves, without ranks; tests/mistakes has the sentence of
each mistake on two ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

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
        recorder.waits_in = (line, entry) if waits else None
    return recorder


def account_of(
    rank: int, recorder: FlightRecorder, *, error: Exception | None = None
) -> RankStatus:
    return rank_status(recorder, rank, thread=threading.get_ident(), error=error)


def test_of_ranks_that_are_silent_or_late_or_in_one_collective_nothing_follows() -> None:
    heard = {rank: account_of(rank, rank_that_began(UNITS)) for rank in (0, 2)}
    assert diagnose(heard, 3) is None
    heard[1] = account_of(1, rank_that_began(UNITS[:2], waits=False))
    assert diagnose(heard, 3) is None
    heard[1] = account_of(1, rank_that_began(UNITS))
    assert diagnose(heard, 3) is None


def test_ranks_that_wait_in_different_collectives_on_one_line_are_named_with_theirs() -> None:
    heard = {rank: account_of(rank, rank_that_began(UNITS)) for rank in range(3)}
    heard[1] = account_of(1, rank_that_began([*UNITS[:2], "all-gather of head"]))
    finding = diagnose(heard, 3)
    assert finding is not None
    assert finding.sentence == (
        "Ranks wait for each other in different collectives: rank 0 in the reduce-scatter of "
        "layers.1, step 412, forward; rank 1 in the all-gather of head, step 412, forward."
    )


def test_a_failure_comes_before_its_consequences() -> None:
    heard = {rank: account_of(rank, rank_that_began(UNITS)) for rank in (0, 2)}
    heard[1] = account_of(1, rank_that_began(UNITS[:1]), error=ValueError("no"))
    finding = diagnose(heard, 4)  # rank 3 is silent
    assert finding is not None
    assert finding.sentence.startswith(
        "Rank 1 failed at step 412, forward (ValueError: no). Ranks 0, 2"
    )


# -- programs that count no steps: what they have called, and what to type instead


def waiting(
    rank: int, call: str, *, whats: Sequence[str] = (), waits: str = "collective"
) -> RankStatus:
    """The status of a rank that waits in a collective of the engine, or else of torch."""
    status = account_of(rank, rank_that_began(whats, of=2, waits=waits == "engine", step=0))
    return replace(status, call=call, waits="collective" if waits == "engine" else waits)


IN_FULL = waiting(0, "full_tensor() at train.py:12")
IN_FORWARD = waiting(1, "forward() at train.py:30", whats=UNITS[:1], waits="engine")


def test_nothing_is_said_while_a_rank_may_still_come() -> None:
    assert diagnose({0: IN_FULL, 1: IN_FORWARD}, 3) is None
    assert diagnose({0: IN_FULL, 1: replace(IN_FORWARD, waits="")}, 2) is None
    assert diagnose({0: replace(IN_FORWARD, rank=0), 1: IN_FORWARD}, 2) is None
    ended = replace(waiting(0, "", waits=""), has_ended=True)
    assert diagnose({0: ended, 1: replace(IN_FORWARD, waits="", waiting_for=None)}, 2) is None


def test_ranks_on_one_line_that_wait_for_the_device_differ_by_what_they_have_started() -> None:
    line = "train at train.py:30"
    here = waiting(0, line, whats=UNITS, waits="device")
    there = waiting(1, line, whats=UNITS[:2], waits="device")
    found = diagnose({0: here, 1: there}, 2)
    assert found is not None
    assert found.sentence == (
        "Ranks wait for each other in different collectives: rank 0 in train at train.py:30, after "
        "the reduce-scatter of layers.1, number 3; rank 1 in train at train.py:30, after the "
        "all-gather of layers.1, number 2."
    )
    assert diagnose({0: here, 1: replace(here, rank=1)}, 2) is None
    late = waiting(1, "sleep at data.py:3", whats=UNITS[:2], waits="")
    assert diagnose({0: here, 1: late}, 2) is None
