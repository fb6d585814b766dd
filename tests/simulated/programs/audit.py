"""Which kept programs make an edge of the engine, and which notices that it is gone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests.fuzz import programs
from tests.fuzz.programs.compare import Outcome
from tests.fuzz.programs.program import Program
from tests.fuzz.programs.worlds import run_simulated, together
from tests.simulated.programs.edges import Edge, watched

KEPT = {
    path.stem: program
    for path in sorted((Path(programs.__file__).parent / "seeds").glob("*.json"))
    if (program := Program.from_json(path.read_text())).world.startswith("sim")
}
GRAPHED = [name for name in KEPT if any(op.do == "graphed" for op in KEPT[name].ops)]


def run(name: str) -> Outcome:
    """Runs a kept program on virtual ranks."""
    return together(run_simulated(KEPT[name].to_json()))


@cache  # one test judges the numbers, the audit the edges
def ran(name: str) -> tuple[Outcome, Mapping[Edge, int]]:
    """Runs a kept program once; returns what came of it, and how often it made each edge."""
    with watched() as seen:
        outcome = run(name)
    return outcome, seen


def edges() -> dict[Edge, dict[str, int]]:
    """Returns for each edge which programs make it, and how often."""
    found: dict[Edge, dict[str, int]] = {}
    for name in KEPT:
        for edge, count in ran(name)[1].items():
            found.setdefault(edge, {})[name] = count
    return found


def is_noticed(makers: Mapping[str, int], removed: Edge) -> bool:
    """Returns whether one of the programs that make an edge has a hazard without it."""

    def chance(name: str) -> tuple[bool, int, int]:
        return not name.startswith("needed_for"), KEPT[name].ranks, -makers[name]

    for name in sorted(makers, key=chance):
        with watched(removed):
            if run(name).differences:
                return True
    return False
