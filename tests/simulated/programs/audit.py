"""Takes every edge of the engine out in turn and says which program notices.

python -m tests.simulated.programs.audit
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from tests.simulated.accelerator import device
from tests.simulated.programs.edges import Edge, watched
from tests.simulated.programs.matrix import CASES
from tests.simulated.programs.running import Outcome, run
from tests.simulated.programs.scenarios import Scenario


@dataclass(frozen=True)
class Verdict:
    """What happened without an edge, or without the marks of one place.

    Attributes:
        what: the edge, or the place.
        caught_by: name of the first program with a hazard; "" if there is none.
        hazard: the first one, in a line.
        tried: programs that make the edge.
    """

    what: str
    caught_by: str
    hazard: str
    tried: int


@cache  # the matrix judges the losses, the audit the edges
def ran(name: str) -> tuple[Outcome, Mapping[Edge, int]]:
    """Runs a program of the matrix once; returns what came of it, and how often it made each
    edge.
    """
    with watched() as seen:
        outcome = run(CASES[name])
    return outcome, seen


def by_edge(seen: Mapping[str, Mapping[Edge, int]]) -> dict[Edge, dict[str, int]]:
    """Returns for each edge which programs make it, and how often."""
    found: dict[Edge, dict[str, int]] = {}
    for name, edges in seen.items():
        for edge, count in edges.items():
            found.setdefault(edge, {})[name] = count
    return found


def edges_of(scenario: Scenario) -> Mapping[Edge, int]:
    """Runs a program; returns how often it made each edge."""
    with watched() as seen:
        run(scenario)
    return seen


def _verdict(
    what: str, makers: Mapping[str, int], *, removed: Edge | None = None, not_recorded: str = ""
) -> Verdict:
    for name in sorted(makers, key=lambda name: (CASES[name].model.ranks, -makers[name])):
        with watched(removed, not_recorded=not_recorded):
            hazards = run(CASES[name]).hazards
        if hazards:
            first = hazards[0]
            line = f"{first.kind}: {first.later.op} after {first.earlier.op}"
            return Verdict(what, name, line, len(makers))
    return Verdict(what, "", "", len(makers))


def audit() -> list[Verdict]:
    """Returns a verdict for each edge, and one for each place that records."""
    edges = by_edge({name: ran(name)[1] for name in CASES})
    verdicts = [_verdict(str(edge), makers, removed=edge) for edge, makers in sorted(edges.items())]
    places: dict[str, dict[str, int]] = {}
    for edge, makers in edges.items():
        if edge.recorded.count(".py:"):
            places.setdefault(edge.recorded, {}).update(makers)
    for place, makers in sorted(places.items()):
        verdicts.append(_verdict(f"the marks of {place}", makers, not_recorded=place))
    return verdicts


def table(verdicts: list[Verdict]) -> str:
    """Returns a line for each verdict."""
    width = max(len(verdict.what) for verdict in verdicts)
    return "\n".join(
        f"{v.what:<{width}} | {v.caught_by or 'NOT CAUGHT'} | "
        f"{v.hazard or f'{v.tried} programs make it'}"
        for v in verdicts
    )


def main() -> int:
    torch.set_num_threads(1)
    device.install()
    verdicts = audit()
    print(table(verdicts))
    missed = [verdict for verdict in verdicts if not verdict.caught_by]
    print(f"{len(verdicts)} removals, {len(verdicts) - len(missed)} caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
