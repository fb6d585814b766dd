"""`python -m tests.drills`: inject faults into the training program and judge the outcome of
each.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import click
from rich.console import Console


@click.command()
@click.option(
    "--count",
    type=click.IntRange(min=1),
    default=None,
    help="Number of drills.  [default: one of each kind]",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="TEXT",
    help="Run only kinds whose name contains TEXT; may be repeated.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    help="Seed of the drawn ranks, steps and locations.  [default: 0]",
)
@click.option(
    "--bound",
    "bound_s",
    type=float,
    default=60.0,
    help="Seconds allowed from the fault to the last exit; a longer run counts as a hang.  "
    "[default: 60]",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append each verdict to this file, as a line of JSON.",
)
@click.option("--list", "is_list", is_flag=True, help="List the kinds of faults and exit.")
def main(
    count: int | None,
    kinds: tuple[str, ...],
    seed: int,
    bound_s: float,
    record: Path | None,
    is_list: bool,
) -> None:
    """Inject every kind of fault into the training program, and judge the outcome.

    A tiny model trains on 1 to 4 ranks on this machine's CPU, with one fault. Every rank has to
    exit in the bound and to report which rank failed, where and why; a resumed run has to give the
    same losses as an undisturbed one. The exit status is 1 if any drill had an unexpected outcome.
    """
    from benchmarks.records import environment
    from shardgrad.programs.cli import main as command
    from tests.drills.faults import CATALOGUE, Fault
    from tests.drills.hosts import can_have_hosts
    from tests.drills.judge import Judge

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
            console.print(
                f"Left out, since network namespaces are not permitted: {', '.join(missing)}."
            )
    if not chosen:
        raise click.UsageError(f"No kind of fault is called {' or '.join(kinds)}: see --list.")
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="shardgrad-drill-") as folder:
        # Under its own name, which every report begins with.
        judge = Judge(partial(command, prog_name="shardgrad"), Path(folder), bound_s=bound_s)
        for number in range(count or len(chosen)):
            verdict = judge.hold(chosen[number % len(chosen)], seed + number // len(chosen))
            verdicts.append(verdict)
            mark = "wrong" if verdict.problems else "right"
            console.print(
                f"{mark}: {verdict.kind} ({verdict.place}), {verdict.exit_s:.1f} s", markup=False
            )
            for line in verdict.problems or (verdict.sentence,):
                console.print(f"    {line}", markup=False)
            if record is not None:
                record.parent.mkdir(parents=True, exist_ok=True)
                with record.open("a", encoding="utf-8") as stream:
                    line = {**dataclasses.asdict(verdict), "environment": environment()}
                    stream.write(json.dumps(line) + "\n")
    wrong = sum(bool(verdict.problems) for verdict in verdicts)
    console.print(f"{len(verdicts)} drills, {wrong} of them wrong.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(prog_name="python -m tests.drills")
