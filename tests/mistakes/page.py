"""The table of mistakes as the page about errors has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.mistakes import building, optimizing, ranks_apart, running, saving
from tests.mistakes.table import MISTAKES, Mistake

PAGE = Path(__file__).parents[2] / "docs/how_to/read_an_error.md"
BEGIN, END = "<!-- mistakes: begin -->\n", "<!-- mistakes: end -->\n"
PARTS = {
    "Building": building,
    "Running": running,
    "Optimizers and gradients": optimizing,
    "Saving, loading, copying": saving,
    "One rank does what the others do not": ranks_apart,
}

APART = [name for name, each in MISTAKES.items() if each.program.__module__ == ranks_apart.__name__]
TOGETHER = [name for name in MISTAKES if name not in APART]  # leave the group as it was


def _rows(mistakes: Iterable[Mistake]) -> Iterator[str]:
    """Yields a row for each answer, with all that is typed to get it."""
    typed: dict[tuple[str, str], list[str]] = {}
    for each in mistakes:
        typed.setdefault((each.says, each.cure), []).append(each.typed)
    for answer, programs in typed.items():
        says, cure = (f"`{text.replace('`', '').replace('|', '/')}`" for text in answer)
        yield f"| {'; '.join(programs)} | {says} | {cure} |\n"


def table() -> str:
    """Returns a table for each kind of mistake."""
    parts = []
    for title, module in PARTS.items():
        rows = _rows(
            each for each in MISTAKES.values() if each.program.__module__ == module.__name__
        )
        parts.append(
            f"\n### {title}\n\n| typed | the first line begins with | cure "
            f"|\n|---|---|---|\n{''.join(rows)}"
        )
    return "".join(parts) + "\n"


def with_table(text: str) -> str:
    """Returns a page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + "\n" + after.lstrip("\n")
