"""Records of drills: one line of JSON each, and totals by kind."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.drills.judge import Verdict

__all__ = ["Tally", "append", "read", "tallies"]


def append(path: Path, verdict: Verdict, environment: Mapping[str, Any]) -> None:
    """Appends a verdict to a file, with the commit and the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(
            json.dumps({**dataclasses.asdict(verdict), "environment": dict(environment)}) + "\n"
        )


def read(path: Path) -> list[Verdict]:
    """Returns all verdicts of a file, in order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_verdict(json.loads(line)) for line in lines]


def _verdict(facts: dict[str, Any]) -> Verdict:
    del facts["environment"]
    return Verdict(**{**facts, "problems": tuple(facts["problems"])})


@dataclass(frozen=True)
class Tally:
    """Totals of one kind.

    Attributes:
        kind: name of the fault.
        held: number of drills.
        wrong: number of drills with an unexpected outcome.
        resumed: number of drills after which the run was resumed to its end.
        median_s: median seconds from the fault to the last exit.
        worst_s: largest number of seconds from the fault to the last exit.
    """

    kind: str
    held: int
    wrong: int
    resumed: int
    median_s: float
    worst_s: float


def tallies(verdicts: Sequence[Verdict]) -> Iterator[Tally]:
    """Yields the totals of each kind, in the order in which the kinds first occur."""
    for kind in dict.fromkeys(verdict.kind for verdict in verdicts):
        held = [verdict for verdict in verdicts if verdict.kind == kind]
        times = [verdict.exit_s for verdict in held]
        yield Tally(
            kind,
            len(held),
            sum(bool(verdict.problems) for verdict in held),
            sum(bool(verdict.resumed_on) for verdict in held),
            statistics.median(times),
            max(times),
        )
