"""Writes the table of drills into `docs/explanation/faults.md`, from the record of the long run.

    python -m tests.drills.table            write it
    python -m tests.drills.table --check    exit with status 1 if it is out of date

The record is `benchmarks/results/drills.jsonl`, written by `python -m tests.drills --record`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.drills.judge import Verdict
from tests.drills.record import read, tallies

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "faults.md"
RECORD = ROOT / "benchmarks" / "results" / "drills.jsonl"
BEGIN, END = "<!-- drills: begin; python -m tests.drills.table -->", "<!-- drills: end -->"


def main(arguments: list[str]) -> int:
    """Writes or checks the table; returns the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    fresh = renewed(text, read(RECORD))
    if "--check" not in arguments:
        PAGE.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        print("explanation/faults.md is out of date; run: python -m tests.drills.table")
        return 1
    return 0


def renewed(text: str, verdicts: Sequence[Verdict]) -> str:
    """Returns the page with a new table between the marks.

    Raises:
        ValueError: the page lacks the marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"{PAGE.name} lacks the marks {BEGIN} and {END}: put them where the table belongs"
        )
    table = "\n".join(lines(verdicts))
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yields the total and a row for each kind."""
    found = list(tallies(verdicts))
    wrong = sum(each.wrong for each in found)
    yield f"{len(verdicts)} drills of {len(found)} kinds, {wrong} of them wrong.\n"
    yield "| kind | drills | wrong | resumed to the end | median s | worst s |"
    yield "|---|---|---|---|---|---|"
    for each in found:
        yield (
            f"| {each.kind} | {each.held} | {each.wrong} | {each.resumed} | {each.median_s:.1f} | "
            f"{each.worst_s:.1f} |"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
