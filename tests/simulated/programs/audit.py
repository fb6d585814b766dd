"""Which programs of the matrix make an edge of the engine, and which notices that it is gone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tests.simulated.programs.edges import Edge, watched
from tests.simulated.programs.matrix import CASES
from tests.simulated.programs.running import Outcome, run


@cache  # the matrix judges the losses, the audit the edges
def ran(name: str) -> tuple[Outcome, Mapping[Edge, int]]:
    """Runs a program of the matrix once; returns what came of it, and how often it made each
    edge.
    """
    with watched() as seen:
        outcome = run(CASES[name])
    return outcome, seen


def edges() -> dict[Edge, dict[str, int]]:
    """Returns for each edge which programs make it, and how often."""
    found: dict[Edge, dict[str, int]] = {}
    for name in CASES:
        for edge, count in ran(name)[1].items():
            found.setdefault(edge, {})[name] = count
    return found


def is_noticed(makers: Mapping[str, int], removed: Edge) -> bool:
    """Returns whether one of the programs that make an edge has a hazard without it."""
    for name in sorted(makers, key=lambda name: (CASES[name].model.ranks, -makers[name])):
        with watched(removed):
            if run(CASES[name]).hazards:
                return True
    return False
