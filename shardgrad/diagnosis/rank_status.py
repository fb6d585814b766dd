"""The status of each rank when a collective hangs or a rank fails, and the diagnosis that follows
from all.

Pure: nothing here communicates. `hang_watchdog.py` collects the statuses.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardgrad.diagnosis.flight_recorder import Entry, FlightRecorder
from shardgrad.diagnosis.thread_stacks import Call, calls_of, thread_stacks

__all__ = ["Diagnosis", "RankStatus", "describe_location", "diagnose", "rank_status"]

_FRAMES = 24


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank.

    Attributes:
        rank: global rank.
        step: see `FlightRecorder`.
        phase: see `FlightRecorder`.
        unit: see `FlightRecorder`.
        error: what failed on this rank; None if nothing did, or only because another rank failed.
        group: name of the process group whose collective the rank waits for; None if it does not
            wait.
        waiting_for: that collective.
        idle_s: seconds since the last sign of progress.
        collectives: by process group, its ranks and the last collectives started there, oldest
            first.
        stack: of the training thread, outermost frame first, one `file:line in function` each.
    """

    rank: int
    step: int
    phase: str
    unit: str
    error: str | None
    group: str | None
    waiting_for: Entry | None
    idle_s: float
    collectives: dict[str, tuple[tuple[int, ...], tuple[Entry, ...]]]
    stack: tuple[str, ...]

    def to_json(self) -> str:
        """Returns the status as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankStatus:
        """Returns the status that `to_json` wrote."""
        fields = json.loads(text)
        fields["waiting_for"] = (
            None if fields["waiting_for"] is None else Entry(*fields["waiting_for"])
        )
        fields["collectives"] = {
            name: (tuple(ranks), tuple(Entry(*entry) for entry in entries))
            for name, (ranks, entries) in fields["collectives"].items()
        }
        fields["stack"] = tuple(fields["stack"])
        return cls(**fields)

    @property
    def location(self) -> str:
        """Where the rank is, for example "step 3, backward of layers.1"."""
        return describe_location(self.step, self.phase, self.unit)

    def last_seq_id(self, group: str) -> int:
        """Returns how many collectives of a process group the rank has started."""
        entries = self.collectives.get(group, ((), ()))[1]
        return entries[-1].seq_id if entries else 0

    def entry(self, group: str, seq_id: int) -> Entry | None:
        """Returns a collective of a process group, if it is still recorded."""
        return next(
            (e for e in self.collectives.get(group, ((), ()))[1] if e.seq_id == seq_id), None
        )


def describe_location(step: int, phase: str, unit: str) -> str:
    """Returns "step 3, backward of layers.1", or as much of it as is known."""
    where = " of ".join(filter(None, (phase, unit if phase in ("", "forward", "backward") else "")))
    return ", ".join(filter(None, (f"step {step}" if step else "", where))) or "an unknown location"


def rank_status(
    recorder: FlightRecorder, rank: int, *, thread: int, error: BaseException | str | None
) -> RankStatus:
    """Returns the status of this rank.

    Args:
        recorder: of this rank.
        rank: global rank.
        thread: identifier of the training thread.
        error: what failed on this rank. Its traceback, if it has one, is the stack.
    """
    group, waiting_for = recorder.waiting_for()
    if isinstance(error, BaseException):
        text: str | None = _first_line(error)
        stack = _format(calls_of(error)[::-1])
    else:
        text = error
        stack = _format(thread_stacks().get(thread, ())[::-1])
    return RankStatus(
        rank=rank,
        step=recorder.step,
        phase=recorder.phase,
        unit=recorder.unit,
        error=text,
        group=group,
        waiting_for=waiting_for,
        idle_s=round(time.monotonic() - recorder.progress_s, 3),
        collectives={log.name: (log.ranks, tuple(log.recent)) for log in recorder.group_logs()},
        stack=stack,
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _format(calls: Sequence[Call]) -> tuple[str, ...]:
    return tuple(f"{call.filename}:{call.line} in {call.name}" for call in calls[-_FRAMES:])


@dataclass(frozen=True)
class Diagnosis:
    """What follows from the statuses of the ranks.

    Attributes:
        culprits: ranks that the others wait for, that failed, or that called other collectives;
            empty if the cause is the network between the ranks.
        what: a sentence about them.
        waits: a sentence about the others: where each is, or what it waits for.
        stack: of the first culprit, if it answered.
    """

    culprits: tuple[int, ...]
    what: str
    waits: str = ""
    stack: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """`what` and `waits`."""
        return f"{self.what} {self.waits}".rstrip()


def diagnose(statuses: Mapping[int, RankStatus], world_size: int) -> Diagnosis:
    """Returns which rank holds up the others, where they wait, and why.

    The cause is looked for in this order: a rank that failed; a rank that called other collectives;
    a rank that does not answer; a rank that answers and has started fewer collectives than the
    others wait for. If all ranks have started what they wait for, it is the network between them.
    """
    for cause in (_failed, _desynchronized):
        diagnosis = cause(statuses)
        if diagnosis is not None:
            return diagnosis
    silent = tuple(rank for rank in range(world_size) if rank not in statuses)
    if silent:
        words = "does not answer: it" if len(silent) == 1 else "do not answer: they"
        was = "was" if len(silent) == 1 else "were"
        return Diagnosis(
            silent,
            f"{_ranks(silent)} {words} ended, or {was} stopped or cut off.",
            _waiting_ranks(statuses, silent),
        )
    late = _late(statuses)
    if late is not None:
        return late
    waiting = [t for t in statuses.values() if t.waiting_for is not None]
    if not waiting:
        return Diagnosis((), "All ranks answer, and none waits for another.")
    first = min(waiting, key=_progress)
    return Diagnosis(
        (),
        f"All ranks have joined {_collective(first)}, and it does not end: the network between "
        f"them is slow "
        "or cut.",
    )


def _failed(statuses: Mapping[int, RankStatus]) -> Diagnosis | None:
    failed = [t for _, t in sorted(statuses.items()) if t.error is not None]
    if not failed:
        return None
    first = failed[0]
    culprits = tuple(t.rank for t in failed)
    what = f"Rank {first.rank} failed at {first.location} ({first.error})."
    return Diagnosis(culprits, what, _waiting_ranks(statuses, culprits), first.stack)


def _desynchronized(statuses: Mapping[int, RankStatus]) -> Diagnosis | None:
    """Finds the first collective of a process group that its ranks called differently."""
    for group in dict.fromkeys(name for t in statuses.values() for name in t.collectives):
        members = [t for _, t in sorted(statuses.items()) if group in t.collectives]
        seq_id = _first_difference(group, members)
        if seq_id is None:
            continue
        made: dict[str, list[RankStatus]] = {}
        for t in members:
            entry = t.entry(group, seq_id)
            if entry is not None:
                made.setdefault(f"{entry.name} ({entry.numel} x {entry.dtype})", []).append(t)
        # The majority is taken to be right; of equally many, those with the lowest rank.
        right = max(made, key=lambda what: (len(made[what]), -made[what][0].rank))
        if len(made) == 1:  # the difference is older than the entries
            return Diagnosis(
                (),
                f"The ranks have left their common order some time before {right} (number "
                f"{seq_id}).",
            )
        wrong = next(what for what in made if what != right)
        odd = made[wrong][0]
        ranks = tuple(t.rank for t in made[wrong])
        return Diagnosis(
            ranks,
            f"{_ranks(ranks)} left the common order at step {odd.step}: the {wrong} where "
            f"{_ranks(tuple(t.rank for t in made[right]), small=True)} made the {right} "
            f"(number {seq_id} of their group).",
            stack=odd.stack,
        )
    return None


def _first_difference(group: str, members: Sequence[RankStatus]) -> int | None:
    """Returns the first number at which fingerprints differ, of those that two members have
    recorded.
    """
    seen: dict[int, set[int]] = {}
    for t in members:
        for entry in t.collectives[group][1]:
            seen.setdefault(entry.seq_id, set()).add(entry.fingerprint)
    different = [seq_id for seq_id, fingerprints in seen.items() if len(fingerprints) > 1]
    return min(different, default=None)


def _late(statuses: Mapping[int, RankStatus]) -> Diagnosis | None:
    """Finds ranks that have not started the collective that another waits for."""
    late: dict[int, RankStatus] = {}
    for t in statuses.values():
        if t.group is None or t.waiting_for is None:
            continue
        for rank in t.collectives[t.group][0]:
            other = statuses.get(rank)
            if other is not None and other.last_seq_id(t.group) < t.waiting_for.seq_id:
                late[rank] = other
    if not late:
        return None
    # A late rank that waits for a third one is held up by it.
    roots = {rank: t for rank, t in late.items() if t.waiting_for is None} or late
    first = min(roots.values(), key=_progress)
    at = f", in {first.stack[-1]}" if first.stack else ""
    return Diagnosis(
        (first.rank,),
        f"Rank {first.rank} is late, at {first.location}{at}.",
        _waiting_ranks(statuses, (first.rank,)),
        first.stack,
    )


def _progress(t: RankStatus) -> tuple[int, int]:
    return t.step, sum(entries[-1].seq_id for _, entries in t.collectives.values() if entries)


def _waiting_ranks(statuses: Mapping[int, RankStatus], culprits: tuple[int, ...]) -> str:
    """Returns "Ranks 0 and 2 were waiting for it in the reduce-scatter of layers.1, step 3." or
    nothing.
    """
    at: dict[str, list[int]] = {}
    for rank, t in sorted(statuses.items()):
        if rank not in culprits:
            at.setdefault(_collective(t) if t.waiting_for is not None else t.location, []).append(
                rank
            )
    pronoun = "it" if len(culprits) == 1 else "them"
    sentences = [
        f"{_ranks(tuple(ranks))} {'was' if len(ranks) == 1 else 'were'} "
        f"{'waiting for ' + pronoun + ' in' if where.startswith('the ') else 'at'} {where}."
        for where, ranks in at.items()
    ]
    return " ".join(sentences)


def _collective(t: RankStatus) -> str:
    entry = t.waiting_for
    what = "a collective" if entry is None else f"the {entry.name}"
    return f"{what}, {describe_location(t.step, t.phase, '')}"


def _ranks(ranks: tuple[int, ...], *, small: bool = False) -> str:
    """Returns "Rank 1", "Ranks 0 and 2", "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 997 more"."""
    word = "rank" if len(ranks) == 1 else "ranks"
    names = [str(rank) for rank in ranks[:8]] + (
        [f"{len(ranks) - 8} more"] if len(ranks) > 8 else []
    )
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{word if small else word.capitalize()} {text}"
