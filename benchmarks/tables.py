"""Printing."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_WIDTH = 120


def show(table: Table) -> None:
    """Prints a table, as wide as it needs where nobody's terminal says how wide it may be."""
    console = Console()
    Console(width=None if console.is_terminal else _WIDTH).print(table)
