"""The status of each rank while a collective hangs, and the diagnosis from the statuses of all
ranks.

Nothing here communicates; `watchdog.py` collects the statuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardgrad.diagnosis.flight_recorder import Entry, FlightRecorder
from shardgrad.diagnosis.thread_stacks import calls_of, calls_of_thread, program_call
from shardgrad.errors import listed

__all__ = ["Diagnosis", "RankStatus", "describe_location", "diagnose", "rank_status"]

_NAMED = 8  # a sentence lists at most this many ranks


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank.

    Attributes:
        rank: global rank.
        step: see `FlightRecorder`.
        location: the rank's position in the program, for example "step 3, backward of layers.1".
        error: the failure on this rank; None if there is none, or if another rank's failure caused
            it.
        fix: what to do about the error; may be empty.
        has_ended: True if the program on this rank has ended.
        waits: "collective" if the host waits in a collective of the engine or of torch; "device" if
            it waits for a device whose stream has pending work; "" if neither is known.
        waiting_for: the recorded collective that the host waits for, if any.
        awaited: the ranks that have to join that collective.
        call: the function that the program has called, and where: "full_tensor() at train.py:12".
        last: the collective that was started last, if any was.
    """

    rank: int
    step: int
    location: str
    error: str | None
    fix: str
    has_ended: bool
    waits: str
    waiting_for: Entry | None
    awaited: tuple[int, ...]
    call: str
    last: Entry | None

    @property
    def place(self) -> str:
        """The collective that the rank waits in, or its position: the step if the program counts
        steps, else the program's line.
        """
        where = self.location if self.step or not self.call else self.call
        if self.waiting_for is not None:
            return f"the {self.waiting_for.name}, {where}"
        if self.waits == "device" and self.last is not None:
            return f"{where}, after the {self.last.name}, number {self.last.seq_id}"
        return where


def describe_location(recorder: FlightRecorder) -> str:
    """Returns the position, like "step 3, backward of layers.1", as far as it is known."""
    step, phase = recorder.step, recorder.phase
    unit = recorder.unit if phase in ("", "forward", "backward") else ""
    where = " of ".join(filter(None, (phase, unit)))
    return ", ".join(filter(None, (f"step {step}" if step else "", where))) or "an unknown location"


def rank_status(
    recorder: FlightRecorder,
    rank: int,
    *,
    thread: int,
    error: BaseException | None = None,
    has_ended: bool = False,
    waits: str = "",
) -> RankStatus:
    """Returns the status of this rank.

    Args:
        recorder: the flight recorder of this rank.
        rank: global rank.
        thread: identifier of the training thread.
        error: the error that was raised on this rank.
        has_ended: see `RankStatus`.
        waits: see `RankStatus`. A wait for a recorded collective is detected without it.
    """
    said, fix = recorder.reported or (None, "")
    if error is None:
        calls = calls_of_thread(thread)
    else:
        calls, fix = calls_of(error), str(getattr(error, "fix", None) or "")
        lines = str(error).strip().splitlines()
        said = ": ".join((type(error).__name__, *lines[:1]))
    log, entry = recorder.waits_in or (None, None)
    return RankStatus(
        rank=rank,
        step=recorder.step,
        location=describe_location(recorder),
        error=said,
        fix=fix,
        has_ended=has_ended,
        waits=waits if entry is None else "collective",
        waiting_for=entry,
        awaited=() if log is None else log.ranks,
        call=program_call(calls),
        last=recorder.last,
    )


class Diagnosis(NamedTuple):
    """Why ranks cannot go on.

    Attributes:
        sentence: what the ranks did that the others wait for, and where those wait.
        fix: what to do next.
    """

    sentence: str
    fix: str


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
    return _failed(statuses) or _apart(statuses, world_size) or _never_sharded(statuses, unwatched)


def _failed(statuses: Mapping[int, RankStatus]) -> Diagnosis | None:
    # A rank that waits in a collective that is not recorded may wait for all ranks.
    awaited = {rank for t in statuses.values() if t.waits for rank in t.awaited or statuses}
    failed = [
        t
        for _, t in sorted(statuses.items())
        if t.error is not None or (t.has_ended and t.rank in awaited)
    ]
    if not failed:
        return None
    first, culprits = failed[0], [t.rank for t in failed]
    where = f"at {first.location}" if first.step or not first.call else f"in {first.call}"
    what = "has finished its program" if first.error is None else f"failed {where} ({first.error})"
    waiting = [t for t in statuses.values() if t.waits and t.rank not in culprits]
    return Diagnosis(
        " ".join([f"Rank {first.rank} {what}.", *_waiting_ranks(statuses, culprits)]),
        first.fix or _fix(waiting, _ENDED if first.error is None else _OTHERWISE),
    )


def _apart(statuses: Mapping[int, RankStatus], world_size: int) -> Diagnosis | None:
    """Finds ranks that all wait, on different lines of the program or in different collectives."""
    ranks = [t for _, t in sorted(statuses.items())]
    if len(ranks) < world_size or not all(t.waits and t.call for t in ranks):
        return None
    by_place = {(t.call, t.place): t for t in ranks[::-1]}
    if len(by_place) == 1:
        return None
    apart = sorted(by_place.values(), key=lambda t: t.rank)
    places = "; ".join(f"rank {t.rank} in {t.place}" for t in apart[:_NAMED])
    sentence = f"Ranks wait for each other in different collectives: {places}."
    return Diagnosis(sentence, _fix(apart))


def _fix(statuses: Iterable[RankStatus], otherwise: str = _OTHERWISE) -> str:
    """Returns what to do about the functions in which ranks wait."""
    calls = [t.call.partition("()") for t in statuses if t.waits == "collective"]
    names = dict.fromkeys(name for name, is_function, _ in calls if is_function)
    fixes = (_FIXES.get(each, f"{each} is a collective: call it on every rank") for each in names)
    return "; ".join(fixes) or otherwise


def _never_sharded(statuses: Mapping[int, RankStatus], never: Sequence[int]) -> Diagnosis | None:
    if not never or not any(t.waits for t in statuses.values()):
        return None
    has = "has" if len(never) == 1 else "have"
    what = f"{_ranks(never)} {has} not called fully_shard."
    sentence = " ".join([what, *_waiting_ranks(statuses, never)])
    return Diagnosis(sentence, _NEVER_SHARDED)


def _waiting_ranks(statuses: Mapping[int, RankStatus], culprits: Sequence[int]) -> list[str]:
    """Returns "Ranks 0, 2 were waiting for it in the reduce-scatter of layers.1, step 3.", and the
    like for each place.
    """
    at: dict[str, list[int]] = {}
    waiting = "waiting for it in" if len(culprits) == 1 else "waiting for them in"
    for rank, t in sorted(statuses.items()):
        if rank not in culprits:
            at.setdefault(f"{waiting if t.waits else 'at'} {t.place}", []).append(rank)
    return [
        f"{_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {where}."
        for where, ranks in at.items()
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """Returns "Rank 1", "Ranks 0, 2", or "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 997 more"."""
    return f"Rank{'s' * (len(ranks) > 1)} {listed(ranks, _NAMED)}"
