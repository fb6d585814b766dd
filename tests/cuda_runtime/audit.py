"""The engine without one of its waits, on torch.cuda and NCCL: wrong values, not only a finding.

    .venv-cuda/bin/python -m tests.cuda_runtime.audit

Every edge that the programs of `tests/simulated` make is taken out in turn. It is caught if, in one of a few
legal orders, a loss of a program that makes it differs from that of the whole engine, or a rank fails; or, if
no loss does, where work that shares memory has no order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

from shardgrad.sharding import zero_copy
from tests.cuda_runtime import inspection, on_cuda  # before what uses the simulated accelerator
from tests.simulated.programs import running
from tests.simulated.programs.edges import Edge, watched
from tests.simulated.programs.matrix import CASES
from tests.support.ranks import RankError, Ranks

ORDERS = ("late", "1", "2", "3")
MOST_TRIED = 12  # programs, for one removal
NO_OTHER_LOSSES = "no order has other losses, but"
Losses = list[list[float]]


@dataclass(frozen=True)
class Run:
    """What one rank has seen.

    Attributes:
        losses: of each order, by step.
        edges: how often each was made, in the first order.
        conflicts: pairs of work without an order, in the first order.
    """

    losses: list[Losses]
    edges: dict[Edge, int]
    conflicts: list[str]


def train(
    name: str, orders: Sequence[str], removed: Edge | None = None, not_recorded: str = "", looks: bool = False
) -> Run:
    """Runs a program of the matrix in each order, on this rank."""
    scenario = CASES[name]
    least = 1 if scenario.model.direct else zero_copy.ZERO_COPY_NBYTES
    losses, edges, conflicts = [], {}, []
    for order in orders:
        with (
            patch.object(zero_copy, "ZERO_COPY_NBYTES", least),
            inspection.order(order),
            watched(removed, not_recorded=not_recorded) as seen,
            on_cuda.checked(raises=False) as found,
        ):
            losses.append(running._train(scenario)[0])
        edges, conflicts = edges or dict(seen), conflicts or list(found)
    return Run(losses, edges, conflicts)


class Audit:
    """Runs programs on ranks that it keeps."""

    def __init__(self) -> None:
        self._worlds: dict[int, Ranks] = {}

    def run(self, name: str, orders: Sequence[str], **options: object) -> list[Run]:
        """Returns each rank's run of a program."""
        size = CASES[name].model.ranks
        ranks = self._worlds.setdefault(size, Ranks(size, backend=on_cuda.BACKEND))
        return ranks.run(train, name, orders, **options, timeout_s=120)

    def stop(self) -> None:
        """Ends the ranks."""
        for ranks in self._worlds.values():
            ranks.stop()

    def caught(self, name: str, right: list[Losses], **removal: object) -> str:
        """Returns in which order, and how, a program notices a removal; "" if it does not."""
        try:
            runs = self.run(name, ORDERS, **removal)
        except RankError as error:
            return f"a rank failed: {str(error).strip().splitlines()[-1]}"
        for number, order in enumerate(ORDERS):
            for rank, run in enumerate(runs):
                if str(run.losses[number]) != str(right[rank]):  # two NaNs are equal
                    return f"order {order}: wrong losses on rank {rank}"
        conflicts = [each for run in runs for each in run.conflicts]
        return f"{NO_OTHER_LOSSES}: {conflicts[0]}" if conflicts else ""


def main(names: Sequence[str]) -> int:
    audit = Audit()
    makers: dict[Edge, dict[str, int]] = {}
    right: dict[str, list[Losses]] = {}
    for name in names or CASES:
        runs = audit.run(name, ("host", *ORDERS))
        right[name] = [run.losses[0] for run in runs]
        same = all(str(losses) == str(run.losses[0]) for run in runs for losses in run.losses)
        conflicts = [each for run in runs for each in run.conflicts]
        verdict = "the same bits in every order" if same else "ORDERS DIFFER"
        print(f"{name}: {verdict}, {len(conflicts)} conflicts", flush=True)
        for edge, count in runs[0].edges.items():
            makers.setdefault(edge, {})[name] = count
    removals = [(str(edge), by, {"removed": edge}) for edge, by in sorted(makers.items())]
    places: dict[str, dict[str, int]] = {}
    for edge, by in makers.items():
        places.setdefault(edge.recorded, {}).update(by)
    for place, by in sorted(places.items()):
        removals.append((f"the marks of {place}", by, {"not_recorded": place}))
    missed = by_values = 0
    for what, by, removal in removals:
        found: list[str] = []
        for name in sorted(by, key=lambda name: (CASES[name].model.ranks, -by[name]))[:MOST_TRIED]:
            how = audit.caught(name, right[name], **removal)
            if how:
                found.append(f"{name} | {how}")
            if how and not how.startswith(NO_OTHER_LOSSES):
                break
        missed += not found
        by_values += bool(found) and NO_OTHER_LOSSES not in found[-1]
        print(f"{what} | {found[-1] if found else 'NOT CAUGHT'}", flush=True)
    print(f"{len(removals)} removals, {len(removals) - missed} caught, {by_values} of them by wrong losses")
    audit.stop()
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
