"""Tables of measured figures, made from the records in `results/`, so that they say nothing else.

    python -m benchmarks readme            write them between the two marks in benchmarks/README.md
    python -m benchmarks readme --check    exit with status 1 if they are out of date

A table is made of the newest record of each kind that counts as a result: a clean tree, compiled
ops, a quiet machine, no smoke run, ranks with devices of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from benchmarks.__main__ import BENCHMARKS
from benchmarks.records import RESULTS, ROOT, Record, is_result, read
from benchmarks.tables import markdown, table_of, title

README = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_NOTE = "<!-- Written by `python -m benchmarks readme` from the records it names. -->"
_STEPS = (
    "step",
    "where",
    "FSDP2 ms",
    "shardgrad / FSDP2",
    "graphed / FSDP2",
    "/ collectives",
    "memory / FSDP2",
    "",
)
# Files that have no records of benchmarks, or those of a program that training_step has replaced.
_LEFT_OUT = ("drills.jsonl", "compare.jsonl", "silent.jsonl", "audit.jsonl", "clients.jsonl")

Found = tuple[str, Record]


@click.command()
@click.option(
    "--check",
    is_flag=True,
    help="Change nothing; exit with status 1 if the tables are out of date.",
)
def main(check: bool) -> None:
    """Measure nothing: write the tables of benchmarks/README.md from the records."""
    found = newest(results(RESULTS))
    text = README.read_text(encoding="utf-8")
    try:
        fresh = replaced(text, "\n".join(tables(found)))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if not check:
        README.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        raise click.ClickException(
            "benchmarks/README.md is out of date; run: python -m benchmarks readme"
        )


def results(folder: Path) -> Iterator[Found]:
    """Records that count as results, of benchmarks that still exist, and the path of each, relative
    to the root of the source tree.
    """
    for path in sorted(folder.rglob("*.jsonl")):
        if path.name not in _LEFT_OUT:
            for record in read(path):
                if record["benchmark"] in BENCHMARKS and is_result(record):
                    yield path.relative_to(folder.parents[1]).as_posix(), record


def newest(found: Iterable[Found]) -> list[Found]:
    """The last record of each kind, devices and titles in the order of their names."""
    by_kind: dict[tuple[str, str, str], Found] = {}
    for path, record in sorted(found, key=lambda pair: pair[1]["environment"]["time"]):
        # Modes of one soak, cases of one run: what is in a summary belongs to the kind.
        rows = (
            "" if record["benchmark"] == "training_step" else json.dumps(sorted(record["summary"]))
        )
        by_kind[_where(record), title(record), rows] = (path, record)
    return [by_kind[kind] for kind in sorted(by_kind)]


def tables(found: Sequence[Found]) -> Iterator[str]:
    """All tables in Markdown: training steps in one, and one for each record of the others."""
    yield _NOTE
    yield from ("", "### training_step", "")
    yield from markdown(_STEPS, [_step_cells(path, record) for path, record in _steps(found)])
    for name in dict.fromkeys(record["benchmark"] for _, record in found):
        if name == "training_step":
            continue
        yield from ("", f"### {name}")
        for path, record in found:
            if record["benchmark"] == name:
                table = table_of(record)
                what = table.title.removeprefix(name).strip(": ")
                yield from ("", f"{what} ([record]({_link(path)}), {table.setting})", "")
                rows = [[row, *cells] for row, cells in table.rows.items()]
                yield from markdown(("", *table.headings), rows)


def replaced(text: str, table: str) -> str:
    """The text with everything between the marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"benchmarks/README.md lacks the marks {BEGIN} and {END}: put them where the tables "
            "belong"
        )
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _steps(found: Sequence[Found]) -> list[Found]:
    return [
        (path, record)
        for path, record in found
        if record["benchmark"] == "training_step"
        and {"fsdp2", "shardgrad"} <= set(record["summary"])
    ]


def _where(record: Record) -> str:
    environment, hosts = record["environment"], record["config"].get("hosts", 1)
    machine = (
        environment.get("device_name") or f"{environment['cores']} cores, {environment['cpu']}"
    )
    return str(machine) if hosts == 1 else f"{hosts} machines of {machine}"


def _link(path: str) -> str:
    return path.removeprefix("benchmarks/")


def _step_cells(path: str, record: Record) -> list[str]:
    summary = record["summary"]
    base, ours = summary["fsdp2"], summary["shardgrad"]
    cells = [title(record), _where(record), f"{base['wall_s']['median'] * 1e3:.2f}"]
    for name in ("shardgrad", "shardgrad-graphed"):
        ratio = summary.get(name, {}).get("ratio_to_base")
        quartiles = " ({:.2f} .. {:.2f})".format(*ratio["quartiles"]) if ratio else ""
        cells.append("" if ratio is None else f"{ratio['median']:.2f}{quartiles}")
    floor = summary.get("collectives")
    cells.append(
        "" if floor is None else f"{ours['wall_s']['median'] / floor['wall_s']['median']:.2f}"
    )
    field = "peak_reserved_nbytes" if "peak_reserved_nbytes" in ours else "peak_rss_nbytes"
    return [*cells, f"{ours[field] / base[field]:.2f}", f"[record]({_link(path)})"]
