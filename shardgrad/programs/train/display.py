"""Progress display: lines everywhere, with a bar below them on a terminal; nothing on all ranks but
rank 0.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shardgrad.programs.checkpoint.files import named_in_errors
from shardgrad.programs.text import escaped


class Display(Progress):
    """What a rank prints of a run.

    Args:
        steps: number of steps of the run.
        title: what stands before the bar.
        leads: whether this rank prints.
        console: where to print.
    """

    def __init__(
        self, steps: int, title: str, *, leads: bool = True, console: Console | None = None
    ) -> None:
        console = console or Console()
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            console=console,
            disable=not leads or not console.is_terminal or console.is_dumb_terminal,
        )
        self._leads = leads
        self._bar = self.add_task(escaped(title), total=steps)

    def note(self, text: str) -> None:
        """Prints a line; rich has it appear above the bar."""
        if self._leads:
            with named_in_errors("standard output"):
                print(escaped(text), flush=True)

    def stepped(self, step: int) -> None:
        """Moves the bar, without waiting for the step's results."""
        self.update(self._bar, completed=step)


def nice_nbytes(count: float) -> str:
    """Formats a number of bytes, such as `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
