"""The README's table of measured figures, made from the records in `results/`, so that it says nothing else.

    python -m benchmarks.readme_table            write it between the two marks in README.md
    python -m benchmarks.readme_table --check    exit with status 1 if it is out of date
    python -m benchmarks.readme_table --show     print it

A row is made of the newest record of each kind that counts as a result: a clean tree, compiled ops, a quiet
machine, no smoke run, ranks with devices of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from shardgrad.bench.words import title

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_NOTE = "<!-- Written by benchmarks/readme_table.py from the records it names. -->"
_HEAD = (
    "what",
    "where",
    "FSDP2 ms",
    "shardgrad / FSDP2",
    "graphed / FSDP2",
    "/ collectives",
    "memory / FSDP2",
    "",
)

Record = Mapping[str, Any]


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with status 1 if the table is out of date.")
@click.option("--show", "is_shown", is_flag=True, help="Print the table instead.")
def main(check: bool, is_shown: bool) -> None:
    """Write the README's table from records."""
    table = "\n".join(lines(newest(results(RESULTS))))
    if is_shown:
        click.echo(table)
        return
    text = README.read_text(encoding="utf-8")
    try:
        fresh = replaced(text, table)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if not check:
        README.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        click.echo("README.md is out of date; run: python -m benchmarks.readme_table")
        sys.exit(1)


def results(folder: Path) -> Iterator[tuple[str, Record]]:
    """Records that count as results, and where each lies, relative to the root of the source tree."""
    for path in sorted(folder.rglob("bench.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if counts(record):
                yield path.relative_to(folder.parents[1]).as_posix(), record


def counts(record: Record) -> bool:
    """Whether a record is a result, by the rules of docs/how_to/benchmark.md."""
    environment, config = record["environment"], record["config"]
    return bool(
        environment["git_is_clean"]
        and environment.get("ops_backend") == "compiled"
        and record["noise"]["is_quiet"]
        and not config["smoke"]
        and not config["share_device"]
        and {"fsdp2", "shardgrad"} <= set(record["summary"])
    )


def newest(found: Iterator[tuple[str, Record]]) -> list[tuple[str, Record]]:
    """The last record of each kind, devices and models in the order of their names."""
    by_kind = {}
    for where, record in sorted(found, key=lambda pair: pair[1]["environment"]["time"]):
        by_kind[_where(record), title(record)] = (where, record)
    return [by_kind[kind] for kind in sorted(by_kind)]


def lines(rows: Sequence[tuple[str, Record]]) -> Iterator[str]:
    """The table as Markdown."""
    yield _NOTE
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|{'---|' * len(_HEAD)}"
    for where, record in rows:
        yield f"| {' | '.join(_cells(where, record))} |"


def replaced(text: str, table: str) -> str:
    """The text with everything between the marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the marks {BEGIN} and {END}: put them where the table belongs")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _where(record: Record) -> str:
    environment = record["environment"]
    return str(environment.get("device_name") or f"{environment['cores']} cores, {environment['cpu']}")


def _cells(where: str, record: Record) -> Iterator[str]:
    summary = record["summary"]
    base, ours = summary["fsdp2"], summary["shardgrad"]
    yield title(record)
    yield _where(record)
    yield f"{base['wall_s']['median'] * 1e3:.2f}"
    for name in ("shardgrad", "shardgrad-graphed"):
        ratio = summary.get(name, {}).get("ratio_to_base")
        yield (
            "" if ratio is None else "{:.2f} ({:.2f} .. {:.2f})".format(ratio["median"], *ratio["quartiles"])
        )
    floor = summary.get("collectives")
    yield "" if floor is None else f"{ours['wall_s']['median'] / floor['wall_s']['median']:.2f}"
    field = "peak_reserved_nbytes" if "peak_reserved_nbytes" in ours else "peak_rss_nbytes"
    yield f"{ours[field] / base[field]:.2f}"
    yield f"[record]({where})"


if __name__ == "__main__":
    main()
