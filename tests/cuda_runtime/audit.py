"""The engine without one of its waits, on torch.cuda and NCCL: wrong values, not only a finding.

    .venv-cuda/bin/python -m tests.cuda_runtime.audit
    .venv-cuda/bin/python -m tests.cuda_runtime.audit --only grad_collector "hooks on a side stream"

Every edge that the programs of `tests/simulated` make is taken out in turn, then all marks of one
place. A removal is noticed if, in one of a few legal orders, a loss of a program that makes the
edge differs from that of the whole engine, or a rank fails; or, if no loss does, where work that
shares memory has no order. A program counts only in orders in which the whole engine has the right
losses and no conflict.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from unittest.mock import patch

from shardgrad.sharding import zero_copy
from tests.cuda_runtime import inspection, on_cuda  # before what uses the simulated accelerator
from tests.simulated.programs import running
from tests.simulated.programs.edges import NOT_IN_THE_MATRIX, Edge, watched
from tests.simulated.programs.matrix import CASES
from tests.support.ranks import RankError, Ranks

ORDERS = ("late", "1", "2", "3")
MOST_TRIED = 18  # programs, for one removal
# Is an event complete because the allocator has asked: what it knows would be an order.
NEVER = 10**9

Losses = list[list[float]]


@dataclass(frozen=True)
class Run:
    """What one rank has seen.

    Attributes:
        losses: by step.
        edges: how often each was made.
        conflicts: pairs of work without an order.
    """

    losses: Losses
    edges: dict[Edge, int]
    conflicts: list[str]

    def __eq__(self, other: object) -> bool:
        # Two NaNs are equal.
        return isinstance(other, Run) and repr(self.losses) == repr(other.losses)


@dataclass(frozen=True)
class Removal:
    """An edge that is not made, or a place whose marks are not recorded; `by` which programs, how
    often.
    """

    name: str
    by: dict[str, int]
    removed: Edge | None = None
    not_recorded: str = ""


def train(name: str, order: str, removed: Edge | None = None, not_recorded: str = "") -> Run:
    """Runs a program of the matrix in an order, on this rank."""
    scenario = CASES[name]
    least = 1 if scenario.model.direct else zero_copy.ZERO_COPY_NBYTES
    with (
        patch.object(zero_copy, "ZERO_COPY_NBYTES", least),
        inspection.order(order, NEVER, lends_at_once=True),
        watched(removed, not_recorded=not_recorded) as seen,
        on_cuda.checked(raises=False) as found,
    ):
        losses = running._train(scenario)[0]
    return Run(losses, dict(seen), found)


class Audit:
    """Runs programs on ranks that it keeps."""

    def __init__(self) -> None:
        self._worlds: dict[int, Ranks] = {}
        self._whole: dict[tuple[str, str], list[Run]] = {}

    def run(self, name: str, order: str, removal: Removal | None = None) -> list[Run]:
        """Returns each rank's run of a program; those of the whole engine are kept."""
        if removal is None and (name, order) in self._whole:
            return self._whole[name, order]
        size = CASES[name].model.ranks
        ranks = self._worlds.setdefault(size, Ranks(size, backend=on_cuda.BACKEND))
        without = () if removal is None else (removal.removed, removal.not_recorded)
        runs: list[Run] = ranks.run(train, name, order, *without, timeout_s=60)
        if removal is None:
            self._whole[name, order] = runs
        return runs

    def stop(self) -> None:
        """Ends the ranks."""
        for ranks in self._worlds.values():
            ranks.stop()

    def noticed(self, removal: Removal) -> tuple[str, bool]:
        """Returns which program notices a removal, and how; and whether a loss is wrong. "" if none
        does.
        """
        conflict = ""
        for name in _tried(removal.by):
            for order in ORDERS:
                try:
                    runs = self.run(name, order, removal)
                except RankError as error:
                    return f"{name} | order {order}: {str(error).strip().splitlines()[-1]}", True
                if runs != self.run(name, "host"):
                    return f"{name} | order {order}: wrong losses", True
                found = [text for run in runs for text in run.conflicts]
                if found and not conflict:
                    conflict = f"{name} | order {order}: {found[0]}"
            if conflict:
                break
        return conflict, False

    def require_right(self, name: str, order: str) -> None:
        """Runs the whole engine, unless it has run so."""
        runs = self.run(name, order)
        conflicts = [text for run in runs for text in run.conflicts]
        if runs != self.run(name, "host") or conflicts:
            raise AssertionError(
                f"the whole engine is wrong: {name}, order {order}: {conflicts[:1]}"
            )


def _tried(by: Mapping[str, int]) -> list[str]:
    """Returns the most frequent makers of each number of ranks, in turn: one rank alone sends
    nothing.

    First those with units, or branches of them, whose inputs get no gradient. Others free their
    memory when it is there, after waits that stand in for one that is gone.
    """

    def order(name: str) -> tuple[bool, int]:
        model = CASES[name].model
        return not (model.frozen_root or model.detached), -by[name]

    worlds: dict[int, list[str]] = {}
    for name in sorted(by, key=order):
        worlds.setdefault(CASES[name].model.ranks, []).append(name)
    turns = zip_longest(*(worlds[size] for size in sorted(worlds)))
    return [name for turn in turns for name in turn if name is not None][:MOST_TRIED]


def removals(names: Iterable[str], audit: Audit) -> list[Removal]:
    """Runs programs in every order; returns what can be taken out."""
    edges: dict[Edge, dict[str, int]] = {}
    places: dict[str, dict[str, int]] = {}
    for name in names:
        for order in ORDERS:
            audit.require_right(name, order)
        for edge, count in audit.run(name, "host")[0].edges.items():
            edges.setdefault(edge, {})[name] = count
            places.setdefault(edge.recorded, {}).setdefault(name, 0)
            places[edge.recorded][name] += count
    return [
        *(
            Removal(str(edge), by, removed=edge)
            for edge, by in sorted(edges.items())
            if edge not in NOT_IN_THE_MATRIX
        ),
        *(
            Removal(f"the marks of {place}", by, not_recorded=place)
            for place, by in sorted(places.items())
        ),
    ]


def main(names: Sequence[str], only: str) -> int:
    audit = Audit()
    began_s = time.monotonic()
    chosen = [removal for removal in removals(names or CASES, audit) if only in removal.name]
    by_values = 0
    missed = []
    try:
        for removal in chosen:
            how, is_wrong = audit.noticed(removal)
            by_values += is_wrong
            if not how:
                missed.append(removal.name)
            tried = len(_tried(removal.by))
            print(f"{removal.name} | {how or f'NOT NOTICED by {tried} programs'}", flush=True)
    finally:
        with contextlib.suppress(RankError):
            audit.stop()
    noticed = len(chosen) - len(missed)
    seconds = time.monotonic() - began_s
    print(
        f"{len(chosen)} removals, {noticed} noticed, {by_values} of them by wrong losses, in "
        f"{seconds:.0f} s"
    )
    return bool(missed) or not chosen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_runtime.audit", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", help="programs of the matrix; by default all")
    parser.add_argument("--only", default="", help="removals whose name has this in it")
    options = parser.parse_args()
    sys.exit(main(options.names, options.only))
