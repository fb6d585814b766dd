"""Writes the table of mistakes into the page about errors: `python -m tests.mistakes`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

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


def mistakes_of(module: ModuleType) -> dict[str, Mistake]:
    """Returns the mistakes that a module has entered."""
    return {
        name: each for name, each in MISTAKES.items() if each.program.__module__ == module.__name__
    }


def with_table(text: str) -> str:
    """Returns a page with the table in its place: a row for each answer, with all that is typed to
    get it.
    """
    parts = []
    for title, module in PARTS.items():
        typed: dict[tuple[str, str], list[str]] = {}
        for each in mistakes_of(module).values():
            typed.setdefault((each.says, each.cure), []).append(each.typed)
        parts.append(
            f"\n### {title}\n\n| typed | the first line begins with | cure |\n|---|---|---|\n"
        )
        for answer, programs in typed.items():
            says, cure = (f"`{text.replace('`', '').replace('|', '/')}`" for text in answer)
            parts.append(f"| {'; '.join(programs)} | {says} | {cure} |\n")
    before, _, rest = text.partition(BEGIN)
    return "".join([before, BEGIN, *parts, "\n", END, rest.partition(END)[2]])


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
