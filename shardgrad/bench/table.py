"""A record on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardgrad.bench.words import Record, cells, setting, title, verdicts

__all__ = ["show"]

_WIDTH = 190  # where nobody's terminal says how wide it is


def show(record: Record, console: Console | None = None) -> None:
    """Prints a record: a row for each contestant, or the reason why it has none."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    headings, rows = cells(record)
    if rows:
        table = Table(title=escape(title(record)), caption=escape(setting(record)))
        table.add_column("", no_wrap=True)
        for number, heading in enumerate(headings):
            table.add_column(escape(heading), justify="right", no_wrap=number == 0)
        for name, texts in rows.items():
            table.add_row(escape(name), *map(escape, texts))
        console.print(table)
    else:
        console.print(title(record), markup=False)
    for name, reason in record["left_out"].items():
        console.print(f"  {name}: {reason}", markup=False)
    for words in verdicts(record):
        console.print(words, style="yellow", markup=False)
