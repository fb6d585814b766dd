"""`shardgrad drill`: break the training program on purpose, and see what it says and what is left of it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from shardgrad.drills.referee import Verdict


@click.command(short_help="Break the training program on purpose, and judge it.")
@click.option(
    "--count", type=click.IntRange(min=1), default=None, help="Drills to hold.  [default: one of each kind]"
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="WORDS",
    help="Only kinds whose name contains this; may be repeated.",
)
@click.option("--seed", type=int, default=0, help="Of what is drawn: ranks, steps, places.  [default: 0]")
@click.option(
    "--bound",
    "bound_s",
    type=float,
    default=40.0,
    help="Seconds from a fault to the last exit; what takes longer counts as a hang.  [default: 40]",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append each verdict to this file, as a line of JSON.",
)
@click.option("--list", "is_list", is_flag=True, help="Only list the kinds.")
def drill(
    count: int | None, kinds: tuple[str, ...], seed: int, bound_s: float, record: Path | None, is_list: bool
) -> None:
    """Break the training program in every way the catalogue knows, and judge what follows.

    A tiny model trains on 1 to 4 ranks of this machine's CPU. Something is done to it; every rank has to end
    within the bound and to say who, where and why, and a resumed run has to give the same losses as one that
    nothing happened to. The exit status is 1 if anything was not as it has to be.
    """
    from rich.console import Console

    from benchmarks.records import environment
    from shardgrad.cli import main
    from shardgrad.drills.faults import CATALOGUE, Fault
    from shardgrad.drills.hosts import can_have_hosts
    from shardgrad.drills.record import append
    from shardgrad.drills.referee import Referee

    console = Console(soft_wrap=True, highlight=False)
    chosen = [kind for kind in CATALOGUE if not kinds or any(words in kind.name for words in kinds)]
    if is_list:
        for kind in chosen:
            console.print(f"{kind.name}: {kind.expects.value}", markup=False)
        return
    if not can_have_hosts():
        missing = [kind.name for kind in chosen if isinstance(kind, Fault) and kind.needs_hosts]
        chosen = [kind for kind in chosen if kind.name not in missing]
        if missing:
            console.print(f"Left out, for want of network namespaces: {', '.join(missing)}.", markup=False)
    if not chosen:
        raise click.UsageError(f"No kind of fault is called {' or '.join(kinds)}: see --list.")
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="shardgrad-drill-") as folder:
        referee = Referee(main, Path(folder), bound_s=bound_s)
        for number in range(count or len(chosen)):
            verdict = referee.hold(chosen[number % len(chosen)], seed + number // len(chosen))
            verdicts.append(verdict)
            mark = "wrong" if verdict.problems else "right"
            console.print(f"{mark}: {verdict.kind} ({verdict.place}), {verdict.exit_s:.1f} s", markup=False)
            for line in verdict.problems or (verdict.sentence,):
                console.print(f"    {line}", markup=False)
            if record is not None:
                append(record, verdict, environment())
    _summarize(console, verdicts)
    sys.exit(1 if any(verdict.problems for verdict in verdicts) else 0)


def _summarize(console: Console, verdicts: list[Verdict]) -> None:
    """Print how long it took from the fault to the last exit, by kind."""
    from rich.table import Table

    from shardgrad.drills.record import tallies

    table = Table("kind", "drills", "wrong", "median s", "worst s")
    for each in tallies(verdicts):
        table.add_row(
            each.kind, str(each.held), str(each.wrong), f"{each.median_s:.1f}", f"{each.worst_s:.1f}"
        )
    console.print(table)
    wrong = sum(bool(verdict.problems) for verdict in verdicts)
    console.print(f"{len(verdicts)} drills, {wrong} of them wrong.")
