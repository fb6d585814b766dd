"""What is kept of drills: a line of JSON for each, and what many of them come to."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardgrad.drills.referee import Verdict

__all__ = ["Tally", "append", "read", "tallies"]


def append(path: Path, verdict: Verdict, environment: Mapping[str, Any]) -> None:
    """Adds a verdict, with the code and the machine it was reached on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({**dataclasses.asdict(verdict), "environment": dict(environment)}) + "\n")


def read(path: Path) -> list[Verdict]:
    """All verdicts of a file, in their order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_verdict(json.loads(line)) for line in lines]


def _verdict(facts: dict[str, Any]) -> Verdict:
    del facts["environment"]
    return Verdict(**{**facts, "problems": tuple(facts["problems"])})


@dataclass(frozen=True)
class Tally:
    """All drills of a kind.

    Attributes:
        kind: of the fault.
        held: how many.
        wrong: of them.
        resumed: of them, after which a run went on to its end.
        median_s: from the fault to the last exit.
        worst_s: the same.
    """

    kind: str
    held: int
    wrong: int
    resumed: int
    median_s: float
    worst_s: float


def tallies(verdicts: Sequence[Verdict]) -> Iterator[Tally]:
    """One for each kind, in the order in which they first come."""
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
