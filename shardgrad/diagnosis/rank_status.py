"""The status of each rank while a collective hangs, and the diagnosis from the statuses of all
ranks.

Nothing here communicates; `watchdog.py` collects the statuses.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from traceback import FrameSummary
from typing import NamedTuple

from shardgrad.diagnosis.flight_recorder import FlightRecorder
from shardgrad.diagnosis.thread_stacks import program_call
from shardgrad.errors import listed

_NAMED = 8  # a sentence lists at most this many ranks


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank.

    Attributes:
        rank: global rank.
        place: the recorded collective that the rank waits in, if any, and the rank's position: the
            step if the program counts steps, else the program's line.
        waits: True if the host waits, in a collective or for a device.
        awaited: the ranks that have to join the recorded collective that the host waits for.
        number: that collective's in its process group; 0 without one.
        failure: "failed", where, and the error; empty if the rank has not failed, or if another
            rank's failure caused it.
        has_ended: True if the program on this rank has ended.
        fix: what to do about the failure, or the function in which the host waits; may be empty.
        told_s: time by the rank's clock, which tells a renewed status from the one before.
    """

    rank: int
    place: str
    waits: bool
    awaited: tuple[int, ...]
    number: int
    failure: str
    has_ended: bool
    fix: str
    told_s: float = field(default_factory=time.time)


# The fix, by the function that the program calls. Any other library function in which a rank waits
# for others is a collective.
_FIXES = {
    "full_tensor": "full_tensor() is a collective: call it on every rank, and use the result on "
    "one",
    "get_model_state_dict": "get_model_state_dict is a collective: call it on every rank; with "
    "StateDictOptions(full_state_dict=True, cpu_offload=True) only rank 0 keeps the tensors",
    "save": "save is a collective, in which every rank writes its part: call it on every rank",
    "clip_grad_norm_": "the norm is over all ranks: call clip_grad_norm_ on every rank",
    "item": "item() of a DTensor is a collective: call it on every rank",
    "barrier": "every rank must reach the barrier: move it out of `if rank == 0:`",
    "backward": "backward reduces gradients over all ranks: call it on every rank, even for a "
    "batch to skip; or `with shardgrad.participate(model):` on ranks that have none",
    "forward": "forward gathers parameters from all ranks: call the model on every rank, even to "
    "evaluate; or `with shardgrad.participate(model):` on ranks that have no batch",
}


def rank_status(
    recorder: FlightRecorder,
    rank: int,
    calls: Sequence[FrameSummary] = (),
    *,
    waits: str = "",
    has_ended: bool = False,
) -> RankStatus:
    """Returns the status of this rank.

    Args:
        recorder: the flight recorder of this rank.
        rank: global rank.
        calls: of the training thread, or those that its error went through; innermost first.
        waits: "collective" if the host waits in a collective of the engine or of torch; "device" if
            it waits for a device whose stream has pending work; "" if neither is known. A wait for
            a recorded collective is detected without it.
        has_ended: see `RankStatus`.
    """
    awaited, last = recorder.waits_in, recorder.last
    call = "" if recorder.step else program_call(calls)  # a step says enough about the position
    place = where = call or recorder.location
    if awaited is not None:
        waits, place = "collective", f"the {awaited.name}, {where}"
    elif waits == "device" and last is not None:
        place = f"{where}, after the {last.name}, number {last.seq_id}"
    failure = fix = ""
    called, is_function, _ = call.partition("()")
    if recorder.reported is not None:
        error, fix = recorder.reported
        failure = f"failed {'in' if call else 'at'} {where} ({error})"
    elif is_function and waits == "collective":
        fix = _FIXES.get(called, f"{called} is a collective: call it on every rank")
    return RankStatus(
        rank=rank,
        place=place,
        waits=waits != "",
        awaited=() if awaited is None else awaited.ranks,
        number=0 if awaited is None else awaited.seq_id,
        failure=failure,
        has_ended=has_ended,
        fix=fix,
    )


class Diagnosis(NamedTuple):
    """What ranks did that the others wait for, and where those wait; and what to do next."""

    sentence: str
    fix: str


_ENDED = (
    "every rank must take the same number of steps: end the loop on all ranks together; or `with "
    "shardgrad.participate(model):` on ranks that have no batch"
)
_OTHERWISE = "every rank must call the same collectives in the same order: look for `if rank == 0:`"
_NEVER_SHARDED = "call fully_shard on every rank: move it out of `if rank == 0:`"


def diagnose(
    statuses: Mapping[int, RankStatus], world_size: int, unwatched: Sequence[int] = ()
) -> Diagnosis | None:
    """Returns which rank blocks the others permanently, where they wait, and why.

    Checks these causes in order: a rank that failed or has ended; ranks that wait on different
    lines of the program or in different collectives; a rank that has never sharded a model. A rank
    that is late or silent may still join, so it is not a cause.

    Args:
        statuses: the statuses of the ranks that answered, by rank.
        world_size: number of ranks.
        unwatched: ranks that have never started a watchdog.
    """
    ranks = [status for _, status in sorted(statuses.items())]
    return _failed(ranks) or _apart(ranks, world_size) or _never_sharded(ranks, unwatched)


def _failed(ranks: Sequence[RankStatus]) -> Diagnosis | None:
    # A rank that waits in a collective that is not recorded may wait for all ranks.
    everyone = [t.rank for t in ranks]
    awaited = {rank for t in ranks if t.waits for rank in t.awaited or everyone}
    lost = [t for t in ranks if t.failure or (t.has_ended and t.rank in awaited)]
    if not lost:
        return None
    first, others = lost[0], [t for t in ranks if t not in lost]
    what = f"Rank {first.rank} {first.failure or 'has finished its program'}."
    return Diagnosis(
        " ".join([what, *_waiting_ranks(others, len(lost))]),
        first.fix or _fix(others, _OTHERWISE if first.failure else _ENDED),
    )


def _apart(ranks: Sequence[RankStatus], world_size: int) -> Diagnosis | None:
    """Finds ranks that wait for each other alone, on different lines of the program or in different
    collectives.
    """
    waiting = {t.rank: t for t in ranks if t.waits}
    # One that waits for a rank that may still come may go on.
    while late := [t for t in waiting.values() if not waiting.keys() >= _awaited(t, world_size)]:
        for t in late:
            del waiting[t.rank]
    places = {t: t.place for t in waiting.values()}
    collectives = {(t.awaited, t.number) for t in places}
    if len({*places.values()}) == 1 and len(collectives) > len(dict(collectives)):
        # A rank has skipped a collective that no host waits for, such as a reduction.
        places = {t: f"{t.place}, its number {t.number}" for t in places}
    if all(len({places[waiting[r]] for r in _awaited(t, world_size)}) == 1 for t in places):
        return None
    first_at: dict[str, RankStatus] = {}
    for t, place in places.items():
        first_at.setdefault(place, t)
    apart = list(first_at.items())
    named = "; ".join(f"rank {t.rank} in {place}" for place, t in apart[:_NAMED])
    sentence = f"Ranks wait for each other in different collectives: {named}."
    return Diagnosis(sentence, _fix([t for _, t in apart], _OTHERWISE))


def _awaited(t: RankStatus, world_size: int) -> set[int]:
    # A collective that is not recorded may need all ranks.
    return {*(t.awaited or range(world_size))}


def _never_sharded(ranks: Sequence[RankStatus], never: Sequence[int]) -> Diagnosis | None:
    if not never or not any(t.waits for t in ranks):
        return None
    has = "has" if len(never) == 1 else "have"
    what = f"{_ranks(never)} {has} not called fully_shard."
    return Diagnosis(" ".join([what, *_waiting_ranks(ranks, len(never))]), _NEVER_SHARDED)


def _fix(ranks: Sequence[RankStatus], otherwise: str) -> str:
    """Returns what to do about the functions in which ranks wait."""
    return "; ".join(dict.fromkeys(t.fix for t in ranks if t.fix)) or otherwise


def _waiting_ranks(ranks: Sequence[RankStatus], awaited: int) -> list[str]:
    """Returns "Ranks 0, 2 were waiting for it in the reduce-scatter of layers.1, step 3.", and the
    like for each place; `awaited` is the number of ranks that they wait for.
    """
    at: dict[str, list[int]] = {}
    waiting = "waiting for it in" if awaited == 1 else "waiting for them in"
    for t in ranks:
        at.setdefault(f"{waiting if t.waits else 'at'} {t.place}", []).append(t.rank)
    return [
        f"{_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {where}."
        for where, ranks in at.items()
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """Returns "Rank 1", "Ranks 0, 2", or "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 997 more"."""
    return f"Rank{'s' * (len(ranks) > 1)} {listed(ranks, _NAMED)}"
