"""Tables of measured figures, made from the records in `results/`, so that they say nothing else.

    python -m benchmarks readme            write them between the two marks in benchmarks/README.md
    python -m benchmarks readme --check    exit with status 1 if they are out of date
    python -m benchmarks readme --small    print the small table for the README of the repository

A table is made of the newest record of each kind that counts as a result: a clean tree, compiled
ops, a quiet machine, no smoke run, ranks with devices of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from benchmarks.records import RESULTS, ROOT, Record, is_result, read
from benchmarks.tables import is_spread, markdown, table_of, title

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
@click.option(
    "--small", is_flag=True, help="Print the small table for the README of the repository instead."
)
def main(check: bool, small: bool) -> None:
    """Measure nothing: write the tables of benchmarks/README.md from the records."""
    found = newest(results(RESULTS))
    if small:
        click.echo("\n".join(small_table(found)))
        return
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
    """Records that count as results, and the path of each, relative to the root of the source
    tree.
    """
    for path in sorted(folder.rglob("*.jsonl")):
        if path.name not in _LEFT_OUT:
            for record in read(path):
                if is_result(record):
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
    yield from markdown(
        _STEPS, [_step_cells(path, record, full=True) for path, record in _steps(found)]
    )
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


def small_table(found: Sequence[Found]) -> Iterator[str]:
    """A few ratios to FSDP2, less is better, each with a link from the root of the source tree."""
    rows: dict[str, list[str]] = {}
    for path, record in sorted(found, key=lambda pair: pair[1]["environment"]["time"]):
        summary, link = record["summary"], f"[record]({path})"
        if record["benchmark"] == "host_overhead":
            for kind, of in summary.items():
                label = f"host CPU time of units of {kind} parameters"
                rows[label] = [f"{_last_ratio(of):.2f}", "", "", link]
        elif record["benchmark"] in ("construction", "optimizers"):
            ratio = summary["shardgrad"].get("ratio_to_fsdp2")
            if ratio is not None:
                label = "wrapping on meta"
                if record["benchmark"] == "optimizers":
                    label = f"optimizer step, case {record['config']['case']}"
                rows[label] = [f"{ratio['median']:.2f}", "", "", link]
    steps = []
    for path, record in _steps(found):
        what, _, _, ours, graphed, _, memory, _ = _step_cells(path, record, full=False)
        steps.append([f"step, {what}", ours, graphed, memory, f"[record]({path})"])
    headings = ("", "shardgrad / FSDP2", "graphed / FSDP2", "memory / FSDP2", "")
    yield from markdown(headings, [*steps, *([label, *cells] for label, cells in rows.items())])


def _last_ratio(of: Record) -> float:
    """The ratio at the largest number of units, where this record has it."""
    if "ratio_to_fsdp2" in of:  # before summaries were by count, and then by engine
        return float(list(of["ratio_to_fsdp2"].values())[-1]["median"])
    counts = [
        row for row in of.values() if is_spread(row.get("shardgrad", {}).get("ratio_to_fsdp2"))
    ]
    return float(counts[-1]["shardgrad"]["ratio_to_fsdp2"]["median"])


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
    environment = record["environment"]
    return str(
        environment.get("device_name") or f"{environment['cores']} cores, {environment['cpu']}"
    )


def _link(path: str) -> str:
    return path.removeprefix("benchmarks/")


def _step_cells(path: str, record: Record, *, full: bool) -> list[str]:
    summary = record["summary"]
    base, ours = summary["fsdp2"], summary["shardgrad"]
    cells = [title(record), _where(record), f"{base['wall_s']['median'] * 1e3:.2f}"]
    for name in ("shardgrad", "shardgrad-graphed"):
        ratio = summary.get(name, {}).get("ratio_to_base")
        quartiles = " ({:.2f} .. {:.2f})".format(*ratio["quartiles"]) if ratio and full else ""
        cells.append("" if ratio is None else f"{ratio['median']:.2f}{quartiles}")
    floor = summary.get("collectives")
    cells.append(
        "" if floor is None else f"{ours['wall_s']['median'] / floor['wall_s']['median']:.2f}"
    )
    field = "peak_reserved_nbytes" if "peak_reserved_nbytes" in ours else "peak_rss_nbytes"
    return [*cells, f"{ours[field] / base[field]:.2f}", f"[record]({_link(path)})"]
