"""Checks a report's rank, step and location against the injector's trace."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardgrad.diagnosis.flight_recorder import Entry
from shardgrad.diagnosis.rank_status import RankStatus
from tests.drills.injector import Trace

__all__ = ["Report", "read_accounts", "reports_in"]

_PREFIX = "shardgrad train: "
_NAMED = re.compile(r"\b[Rr]anks? (\d+(?:(?:, | and )\d+)*)")
_STEP = re.compile(r"\bstep (\d+)\b")
_NUMBER = re.compile(r"\(number (\d+) of their group\)")
_PARAMETER = re.compile(r"\bparameter [\w.]+")
_OWN_PLACE = re.compile(r"Rank \d+ was (waiting for it )?in the .+, step \d+")
# Other ranks may wait in a collective that the faulty rank had launched: prefetched all-gathers,
# and the last round of a ring of slots.
_BEGUN_AHEAD = 4


class Report:
    """One report of the program on why a run ended.

    Args:
        sentence: the report as printed.
        accounts: status of the ranks, as far as they were queried.
    """

    def __init__(self, sentence: str, accounts: Sequence[RankStatus] = ()) -> None:
        self.sentence = sentence
        self._accounts = accounts

    def wrong_claims(self, trace: Trace) -> list[str]:
        """Returns what is wrong in a report that has to name the faulty rank, the step and the
        location.
        """
        return [
            f"{words}: {self.sentence}"
            for words in (*self._rank(trace), *self._step(trace), *self._place(trace))
        ]

    def missing_claims(self, trace: Trace) -> list[str]:
        """Returns what is missing in a report of a fault without a faulty rank: its rank's own
        location.
        """
        is_placed = _PARAMETER.search(self.sentence) or _OWN_PLACE.search(self.sentence)
        words = [] if is_placed else ["the report names neither a collective nor a parameter"]
        return [f"{what}: {self.sentence}" for what in (*words, *self._step(trace))]

    def _rank(self, trace: Trace) -> list[str]:
        named = _NAMED.search(self.sentence)
        ranks = [] if named is None else [int(rank) for rank in re.findall(r"\d+", named[1])]
        if trace.plan_rank not in ranks or re.match(r"Rank \d+: ", self.sentence):
            return [f"the report does not accuse rank {trace.plan_rank}"]
        # With two replicas that differ, either may be the wrong one.
        if len(ranks) > 1 and "between the replicas" not in self.sentence:
            return [f"the report does not accuse rank {trace.plan_rank} alone"]
        return []

    def _step(self, trace: Trace) -> list[str]:
        """Checks the step. Ranks are less than a step apart, and replicas are compared after a
        step.
        """
        steps = [int(step) for step in _STEP.findall(self.sentence)]
        if steps and all(abs(step - trace.step) <= 1 for step in steps):
            return []
        return [f"the report does not speak of step {trace.step}"]

    def _place(self, trace: Trace) -> list[str]:
        if "failed at" in self.sentence or "is late, at" in self.sentence:
            place = re.search(
                rf"(failed|is late,) at {re.escape(trace.place)}(:|,| \()", self.sentence
            )
            return [] if place else [f"the report does not say that it was at {trace.place}"]
        number = _NUMBER.search(self.sentence)
        if number is not None:
            is_right = any(_is_near(int(number[1]), begun) for begun in trace.begun.values())
            return [] if is_right else ["the report names another place in the order"]
        if _PARAMETER.search(self.sentence) or "the loss of rank" in self.sentence:
            return []
        return self._waits(trace)

    def _waits(self, trace: Trace) -> list[str]:
        """Checks that ranks which wait for the faulty rank wait in a collective that it has not
        finished.
        """
        waits = [
            (each.waiting_for, trace.begun.get(each.group, 0))
            for each in self._accounts
            if each.waiting_for is not None
            and each.group is not None
            and each.rank != trace.plan_rank
            if trace.plan_rank in each.collectives[each.group][0]
        ]
        wrong = [entry.name for entry, begun in waits if not _is_near(entry.seq_id, begun)]
        if wrong:
            return [
                f"a rank waits in {', '.join(wrong)}, which rank {trace.plan_rank} was not near"
            ]
        if not any(f"in the {entry.name}, step" in self.sentence for entry, _ in waits):
            return ["the report does not name the collective in which the others waited"]
        return []


def _is_near(number: int, begun: int) -> bool:
    return abs(number - begun) <= _BEGUN_AHEAD


def read_accounts(path: Path) -> list[RankStatus]:
    """Returns the status of every rank from the file in the run folder; empty if there is no
    file.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["ranks"]
    except (OSError, ValueError):
        return []
    return [_status(each) for each in told]


def _status(told: dict[str, Any]) -> RankStatus:
    """Returns a status from its fields, in which JSON has lists for tuples."""
    awaited = told["waiting_for"]
    collectives = {
        name: (tuple(ranks), tuple(Entry(*entry) for entry in entries))
        for name, (ranks, entries) in told["collectives"].items()
    }
    return RankStatus(
        **told
        | {"waiting_for": awaited and Entry(*awaited), "collectives": collectives}
        | {"stack": tuple(told["stack"])}
    )


def reports_in(words: str, accounts: Sequence[RankStatus]) -> list[Report]:
    """Returns the program's reports in a text, in order; each ends with the command that resumes
    the run.
    """
    said = [line.removeprefix(_PREFIX) for line in words.splitlines() if line.startswith(_PREFIX)]
    # What the launcher says knows how a rank ended, and not where.
    return [
        Report(line, accounts)
        for line in said
        if "esume with: " in line and not re.match(r"Rank \d+ (was ended by|ended with)", line)
    ]
