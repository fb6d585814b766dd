"""Records as tables on the terminal, and as one HTML file that needs no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import rich.table
from jinja2 import Environment, StrictUndefined
from rich.console import Console
from rich.markup import escape

from benchmarks.engines.catalogue import ENGINES
from benchmarks.records import Record, read
from benchmarks.tables import COLUMNS, Table, headline, rows_of, table_of, words

_WIDTH = 100  # where there is no terminal that says how wide it is
_PAGE_WIDTH = 155  # characters of a table that the page has room for beside a wide screen's margins
_PAGE = Path(__file__).with_name("report.html")


def show(record: Record) -> None:
    """Prints a record: its notes, its rows, and the reasons of those that have none."""
    console, table = Console(highlight=False), table_of(record)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(table.verdict, style=None if table.is_quiet else "yellow", markup=False)
    for note in table.notes:
        console.print(note, style="yellow", markup=False)
    if headline(record):
        console.print(headline(record), style="bold", markup=False)
    console.print(table.title, style="italic", markup=False)
    for columns in _that_fit(table, console.width):
        drawn = rich.table.Table("")
        for column in columns:
            drawn.add_column(
                escape(table.headings[column]),
                justify="right",
                no_wrap=len(columns) > 1,
                overflow="fold",
            )
        for name, cells in table.rows.items():
            drawn.add_row(escape(name), *(escape(cells[column]) for column in columns))
        console.print(drawn)
    if table.rows:
        console.print(table.setting, style="dim italic", markup=False)
    for name, reason in record.get("left_out", {}).items():
        console.print(f"  {name}: {reason}", markup=False, soft_wrap=True)


def _that_fit(table: Table, width: int) -> Iterator[list[int]]:
    """Yields the columns of a table in groups, each of which fits with the names of the rows."""
    room = left = width - 4 - min(width // 2, max(map(len, table.rows), default=0))
    group: list[int] = []
    for column, name in enumerate(table.headings if table.rows else ()):
        taken = 3 + max(len(name), *(len(cells[column]) for cells in table.rows.values()))
        if group and taken > left:
            yield group
            group, left = [], room
        group.append(column)
        left -= taken
    if group:
        yield group


def write(records: Sequence[Record], folder: Path) -> Path:
    """Writes `report.html`; folders are made if they are missing. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(render(records), encoding="utf-8")
    return path


def render(records: Sequence[Record]) -> str:
    """The page as HTML. Whatever records hold is shown as text and never becomes markup or script.

    Args:
        records: in the order of the page, but for steps, which are first.
    """
    records = sorted(records, key=lambda record: record["benchmark"] != "training_step")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    steps = [record for record in records if record["benchmark"] == "training_step"]
    named = dict.fromkeys(
        name for record in steps for name in (*record["summary"], *record["left_out"])
    )
    return environment.from_string(_PAGE.read_text(encoding="utf-8")).render(
        sections=[_section(record) for record in records],
        engines={name: ENGINES[name].words for name in named if name in ENGINES},
        columns=list(COLUMNS.values()),
    )


def _section(record: Record) -> dict[str, Any]:
    table = table_of(record)
    return {
        "table": table,
        "columns": list(_that_fit(table, _PAGE_WIDTH)),
        "headline": headline(record),
        "bars": _bars(record),
        "left_out": record.get("left_out", {}),
        "peak": record["config"].get("mfu_peak"),
        "facts": json.dumps(
            {"environment": record["environment"], "config": record["config"]}, indent=2
        ),
    }


def _bars(record: Record) -> list[dict[str, Any]]:
    """Times of rows as parts of the longest one: name, words, and per cent of lower quartile,
    upper quartile and median.
    """
    rows = {", ".join(path): row for path, row in rows_of(record["summary"]) if "wall_s" in row}
    longest = max((row["wall_s"]["quartiles"][1] for row in rows.values()), default=1.0)
    return [
        {
            "name": name,
            "words": words("wall_s", row["wall_s"]["median"]),
            "ends": [
                100 * part / longest
                for part in (*row["wall_s"]["quartiles"], row["wall_s"]["median"])
            ],
        }
        for name, row in rows.items()
    ]


@click.command()
@click.option(
    "--record",
    "paths",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    required=True,
    help="File of records; repeatable.",
)
@click.pass_obj
def main(run: Any, paths: Sequence[Path]) -> None:
    """Measure nothing: print records, and write the page of them."""
    for path in paths:
        try:
            found = list(read(path))
        except ValueError as error:
            raise click.UsageError(f"{error}.") from error
        for record in found:
            show(record)
        run.records += found
