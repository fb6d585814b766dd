"""Whether a report is true: what it says of rank, step and place, against what the saboteur wrote down."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from shardgrad.diagnosis.rank_status import Account
from shardgrad.drills.saboteur import Trace

__all__ = ["Report", "read_accounts", "reports_in"]

_PREFIX = "shardgrad train: "
_NAMED = re.compile(r"\b[Rr]anks? (\d+(?:(?:, | and )\d+)*)")
_STEP = re.compile(r"\bstep (\d+)\b")
_NUMBER = re.compile(r"\(number (\d+) of their group\)")
_PARAMETER = re.compile(r"\bparameter [\w.]+")
_OWN_PLACE = re.compile(r"Rank \d+ was (waiting for it )?in the .+, step \d+")
# Others may wait in what the culprit had begun: what is gathered ahead, and a ring's last round.
_BEGUN_AHEAD = 4


class Report:
    """One sentence of the program, on how a run came to its end.

    Args:
        sentence: as it was printed.
        accounts: what the ranks said of themselves, as far as they were asked.
    """

    def __init__(self, sentence: str, accounts: Sequence[Account] = ()) -> None:
        self.sentence = sentence
        self._accounts = accounts

    def untruths(self, trace: Trace) -> list[str]:
        """What is wrong in a report that has to name whom, and where, the saboteur struck."""
        return [
            f"{words}: {self.sentence}"
            for words in (*self._rank(trace), *self._step(trace), *self._place(trace))
        ]

    def vagueness(self, trace: Trace) -> list[str]:
        """What is wrong in a report of a fault that lies with no rank: it has to say where its rank was."""
        is_placed = _PARAMETER.search(self.sentence) or _OWN_PLACE.search(self.sentence)
        words = [] if is_placed else ["the report names neither a collective nor a parameter"]
        return [f"{what}: {self.sentence}" for what in (*words, *self._step(trace))]

    def _rank(self, trace: Trace) -> list[str]:
        named = _NAMED.search(self.sentence)
        ranks = [] if named is None else [int(rank) for rank in re.findall(r"\d+", named[1])]
        if trace.plan_rank not in ranks or re.match(r"Rank \d+: ", self.sentence):
            return [f"the report does not accuse rank {trace.plan_rank}"]
        # Of two replicas that differ, nobody knows which is wrong.
        if len(ranks) > 1 and "between the replicas" not in self.sentence:
            return [f"the report does not accuse rank {trace.plan_rank} alone"]
        return []

    def _step(self, trace: Trace) -> list[str]:
        """Ranks are less than a step apart, and replicas are compared after one."""
        steps = [int(step) for step in _STEP.findall(self.sentence)]
        if steps and all(abs(step - trace.step) <= 1 for step in steps):
            return []
        return [f"the report does not speak of step {trace.step}"]

    def _place(self, trace: Trace) -> list[str]:
        if "failed at" in self.sentence or "is late, at" in self.sentence:
            place = re.search(rf"(failed|is late,) at {re.escape(trace.place)}(:|,| \()", self.sentence)
            return [] if place else [f"the report does not say that it was at {trace.place}"]
        number = _NUMBER.search(self.sentence)
        if number is not None:
            is_right = any(_is_near(int(number[1]), begun) for begun in trace.begun.values())
            return [] if is_right else ["the report names another place in the order"]
        if _PARAMETER.search(self.sentence) or "the loss of rank" in self.sentence:
            return []
        return self._waits(trace)

    def _waits(self, trace: Trace) -> list[str]:
        """Who waits for the culprit itself has to wait in a collective that it has not ended."""
        waits = [
            (each.awaited, trace.begun.get(each.group, 0))
            for each in self._accounts
            if each.awaited is not None and each.group is not None and each.rank != trace.plan_rank
            if trace.plan_rank in each.lines[each.group][0]
        ]
        wrong = [entry.what for entry, begun in waits if not _is_near(entry.number, begun)]
        if wrong:
            return [f"somebody waits in {', '.join(wrong)}, which rank {trace.plan_rank} was not near"]
        if not any(f"in the {entry.what}, step" in self.sentence for entry, _ in waits):
            return ["the report does not name the collective in which the others waited"]
        return []


def _is_near(number: int, begun: int) -> bool:
    return abs(number - begun) <= _BEGUN_AHEAD


def read_accounts(path: Path) -> list[Account]:
    """What every rank said, from the file that an inquest leaves; nothing if there was none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["ranks"]
    except (OSError, ValueError):
        return []
    return [Account.from_json(json.dumps(each)) for each in told]


def reports_in(words: str, accounts: Sequence[Account]) -> list[Report]:
    """The program's reports in what was printed, in their order; each ends with how to go on."""
    said = [line.removeprefix(_PREFIX) for line in words.splitlines() if line.startswith(_PREFIX)]
    return [Report(line, accounts) for line in said if "esume with: " in line]
