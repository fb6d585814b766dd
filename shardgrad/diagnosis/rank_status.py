"""What each rank says of itself when something hangs or fails, and what follows from it all.

Pure: nothing here communicates. `hang_watchdog.py` collects the accounts.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from shardgrad.diagnosis.flight_recorder import Entry, Journal

__all__ = ["Account", "Finding", "conclude", "give_account"]

_FRAMES = 24


@dataclass(frozen=True)
class Account:
    """One rank's own word.

    Attributes:
        rank: whose.
        step: see `Journal`.
        part: see `Journal`.
        unit: see `Journal`.
        error: what went wrong on this rank itself; None if nothing did, or only because of others.
        group: name of the group of ranks in whose collective it waits; None if it does not wait.
        awaited: that collective.
        waited_s: for how long nothing has moved here.
        lines: by group, its ranks and the last collectives begun there, oldest first.
        stack: of the thread that trains, outermost first, one `file:line in function` each.
    """

    rank: int
    step: int
    part: str
    unit: str
    error: str | None
    group: str | None
    awaited: Entry | None
    waited_s: float
    lines: dict[str, tuple[tuple[int, ...], tuple[Entry, ...]]]
    stack: tuple[str, ...]

    def to_json(self) -> str:
        """The account as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Account:
        """The inverse of `to_json`."""
        facts = json.loads(text)
        facts["awaited"] = None if facts["awaited"] is None else Entry(*facts["awaited"])
        facts["lines"] = {
            name: (tuple(ranks), tuple(Entry(*entry) for entry in entries))
            for name, (ranks, entries) in facts["lines"].items()
        }
        facts["stack"] = tuple(facts["stack"])
        return cls(**facts)

    @property
    def place(self) -> str:
        """Where the rank is, in words: "step 3, backward of layers.1"."""
        return place_in_words(self.step, self.part, self.unit)

    def begun(self, group: str) -> int:
        """How many collectives of a group the rank has begun."""
        entries = self.lines.get(group, ((), ()))[1]
        return entries[-1].number if entries else 0

    def entry(self, group: str, number: int) -> Entry | None:
        """A collective of a group by its place in the order, if it is still remembered."""
        return next((e for e in self.lines.get(group, ((), ()))[1] if e.number == number), None)


def place_in_words(step: int, part: str, unit: str) -> str:
    """Returns "step 3, backward of layers.1", or as much of it as is known."""
    where = " of ".join(filter(None, (part, unit if part in ("", "forward", "backward") else "")))
    return ", ".join(filter(None, (f"step {step}" if step else "", where))) or "a place it does not name"


def give_account(journal: Journal, rank: int, *, thread: int, error: BaseException | str | None) -> Account:
    """Returns this rank's account.

    Args:
        journal: of this rank.
        rank: in the whole world.
        thread: identifier of the thread that trains.
        error: what failed on this rank itself. Its traceback, if it has one, is the stack.
    """
    group, awaited = journal.awaited()
    frame = sys._current_frames().get(thread)
    known = isinstance(error, BaseException)
    return Account(
        rank=rank,
        step=journal.step,
        part=journal.part,
        unit=journal.unit,
        error=_first_line(error) if isinstance(error, BaseException) else error,
        group=group,
        awaited=awaited,
        waited_s=round(time.monotonic() - journal.moved_s, 3),
        lines={line.name: (line.ranks, tuple(line.recent)) for line in journal.lines()},
        stack=_stack_of(error) if known else _stack(frame),  # type: ignore[arg-type]
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    return _in_words(traceback.extract_stack(frame)) if frame is not None else ()


def _stack_of(error: BaseException) -> tuple[str, ...]:
    return _in_words(traceback.extract_tb(error.__traceback__))


def _in_words(frames: Sequence[traceback.FrameSummary]) -> tuple[str, ...]:
    return tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames[-_FRAMES:])


@dataclass(frozen=True)
class Finding:
    """What follows from the accounts.

    Attributes:
        culprits: ranks that the others wait for, that failed by themselves, or that left the common order;
            empty if it lies between the ranks.
        what: a sentence on them.
        waits: a sentence on the others: where each is, or waits.
        stack: of the first culprit, if it answered.
    """

    culprits: tuple[int, ...]
    what: str
    waits: str = ""
    stack: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Both together."""
        return f"{self.what} {self.waits}".rstrip()


def conclude(accounts: Mapping[int, Account], world_size: int) -> Finding:
    """Names who holds up the others, where they wait, and what kind of trouble it is.

    Ranks are suspected in this order: who failed by itself; who left the common order of collectives; who
    does not answer; who answers and has begun fewer collectives than the others wait for. If all have joined
    what they wait for, it is the network between them.
    """
    for suspect in (_failed, _out_of_order):
        finding = suspect(accounts)
        if finding is not None:
            return finding
    silent = tuple(rank for rank in range(world_size) if rank not in accounts)
    if silent:
        words = "does not answer: it" if len(silent) == 1 else "do not answer: they"
        was = "was" if len(silent) == 1 else "were"
        return Finding(
            silent,
            f"{_ranks(silent)} {words} ended, or {was} stopped or cut off.",
            _who_waits(accounts, silent),
        )
    late = _late(accounts)
    if late is not None:
        return late
    waiting = [t for t in accounts.values() if t.awaited is not None]
    if not waiting:
        return Finding((), "All ranks answer, and none waits for another.")
    first = min(waiting, key=_progress)
    return Finding(
        (),
        f"All ranks have joined {_collective(first)}, and it does not end: the network between them is slow "
        "or cut.",
    )


def _failed(accounts: Mapping[int, Account]) -> Finding | None:
    failed = [t for _, t in sorted(accounts.items()) if t.error is not None]
    if not failed:
        return None
    first = failed[0]
    culprits = tuple(t.rank for t in failed)
    what = f"Rank {first.rank} failed at {first.place} ({first.error})."
    return Finding(culprits, what, _who_waits(accounts, culprits), first.stack)


def _out_of_order(accounts: Mapping[int, Account]) -> Finding | None:
    """Looks in each group for the first collective that not all its ranks have made alike."""
    for group in dict.fromkeys(name for t in accounts.values() for name in t.lines):
        members = [t for _, t in sorted(accounts.items()) if group in t.lines]
        number = _first_difference(group, members)
        if number is None:
            continue
        made: dict[str, list[Account]] = {}
        for t in members:
            entry = t.entry(group, number)
            if entry is not None:
                made.setdefault(f"{entry.what} ({entry.numel} x {entry.dtype})", []).append(t)
        # Most are taken to be right; among equals, those with the lowest rank.
        right = max(made, key=lambda what: (len(made[what]), -made[what][0].rank))
        if len(made) == 1:  # before what is remembered
            return Finding(
                (), f"The ranks have left their common order some time before {right} (number {number})."
            )
        wrong = next(what for what in made if what != right)
        odd = made[wrong][0]
        ranks = tuple(t.rank for t in made[wrong])
        return Finding(
            ranks,
            f"{_ranks(ranks)} left the common order at step {odd.step}: the {wrong} where "
            f"{_ranks(tuple(t.rank for t in made[right]), small=True)} made the {right} "
            f"(number {number} of their group).",
            stack=odd.stack,
        )
    return None


def _first_difference(group: str, members: Sequence[Account]) -> int | None:
    """The first number at which fingerprints differ, among those that at least two members remember."""
    seen: dict[int, set[int]] = {}
    for t in members:
        for entry in t.lines[group][1]:
            seen.setdefault(entry.number, set()).add(entry.fingerprint)
    different = [number for number, fingerprints in seen.items() if len(fingerprints) > 1]
    return min(different, default=None)


def _late(accounts: Mapping[int, Account]) -> Finding | None:
    """Looks for ranks that have not begun what another waits for."""
    late: dict[int, Account] = {}
    for t in accounts.values():
        if t.group is None or t.awaited is None:
            continue
        for rank in t.lines[t.group][0]:
            other = accounts.get(rank)
            if other is not None and other.begun(t.group) < t.awaited.number:
                late[rank] = other
    if not late:
        return None
    # Who waits for somebody else is held up itself.
    roots = {rank: t for rank, t in late.items() if t.awaited is None} or late
    first = min(roots.values(), key=_progress)
    at = f", in {first.stack[-1]}" if first.stack else ""
    return Finding(
        (first.rank,),
        f"Rank {first.rank} is late, at {first.place}{at}.",
        _who_waits(accounts, (first.rank,)),
        first.stack,
    )


def _progress(t: Account) -> tuple[int, int]:
    return t.step, sum(entries[-1].number for _, entries in t.lines.values() if entries)


def _who_waits(accounts: Mapping[int, Account], culprits: tuple[int, ...]) -> str:
    """Returns "Ranks 0 and 2 were waiting for it in the reduce-scatter of layers.1, step 3." or nothing."""
    at: dict[str, list[int]] = {}
    for rank, t in sorted(accounts.items()):
        if rank not in culprits:
            at.setdefault(_collective(t) if t.awaited is not None else t.place, []).append(rank)
    whom = "it" if len(culprits) == 1 else "them"
    sentences = [
        f"{_ranks(tuple(ranks))} {'was' if len(ranks) == 1 else 'were'} "
        f"{'waiting for ' + whom + ' in' if where.startswith('the ') else 'at'} {where}."
        for where, ranks in at.items()
    ]
    return " ".join(sentences)


def _collective(t: Account) -> str:
    entry = t.awaited
    what = "a collective" if entry is None else f"the {entry.what}"
    return f"{what}, {place_in_words(t.step, t.part, '')}"


def _ranks(ranks: tuple[int, ...], *, small: bool = False) -> str:
    """Returns "Rank 1", "Ranks 0 and 2", "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 997 more"."""
    word = "rank" if len(ranks) == 1 else "ranks"
    names = [str(rank) for rank in ranks[:8]] + ([f"{len(ranks) - 8} more"] if len(ranks) > 8 else [])
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{word if small else word.capitalize()} {text}"
