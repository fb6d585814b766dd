"""Progress display: a live panel on a terminal, plain lines elsewhere, nothing on all ranks but
rank 0.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardgrad.checkpoint.text import escaped
from shardgrad.train.record import StepMetrics


class SilentDisplay:
    """Shows nothing; base class of the other displays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def note(self, text: str) -> None:
        """Shows a message that stays on the screen."""

    def stepped(self, step: int) -> None:
        """Shows that a step is done, without waiting for its results."""

    def progress(self, metrics: StepMetrics) -> None:
        """Shows the progress of the run."""


class PlainDisplay(SilentDisplay):
    """Prints one line per message, for files, pipes and CI.

    Args:
        steps: number of steps of the run.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def note(self, text: str) -> None:
        """Prints the text."""
        print(escaped(text), flush=True)

    def progress(self, metrics: StepMetrics) -> None:
        """Prints the metrics on one line."""
        values = "  ".join(f"{name} {value}" for name, value in _values(metrics))
        print(f"step {metrics.step}/{self._steps}  {values}", flush=True)


class LiveDisplay(SilentDisplay):
    """A panel that is redrawn in place; messages scroll above it.

    Args:
        steps: number of steps of the run.
        title: title of the panel.
        console: console to draw on.
    """

    def __init__(self, steps: int, title: str, console: Console) -> None:
        self._steps = steps
        self._title = title
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._step = 0
        self._values: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        self._live.start()
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.transient = kind is not None  # what comes next would leave half of the panel
        self._live.stop()

    def note(self, text: str) -> None:
        """Prints the text above the panel."""
        self._live.console.print(escaped(text), markup=False, highlight=False)

    def stepped(self, step: int) -> None:
        """Moves the bar."""
        self._step = step
        self._draw()

    def progress(self, metrics: StepMetrics) -> None:
        """Redraws the panel."""
        self._step, self._values = metrics.step, _values(metrics)
        self._draw()

    def _draw(self) -> None:
        numbers = Table.grid(padding=(0, 2))
        if self._values:
            numbers.add_row(*(f"[dim]{name}[/dim]" for name, _ in self._values))
            numbers.add_row(*(f"[bold]{value}[/bold]" for _, value in self._values))
        panel = Table.grid(expand=True)
        panel.add_row(f"step {self._step} of {self._steps}" if self._step else "the first step")
        panel.add_row(ProgressBar(total=self._steps, completed=self._step))
        panel.add_row(numbers)
        self._live.update(
            Panel(
                panel,
                title=Text(escaped(self._title)),
                expand=False,
                width=min(100, self._live.console.width),
            )
        )


def choose_display(*, leads: bool, steps: int, title: str) -> SilentDisplay:
    """Returns the display for this rank and its standard output."""
    if not leads:
        return SilentDisplay()
    console = Console()
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return LiveDisplay(steps, title, console)
    return PlainDisplay(steps)


def nice_nbytes(count: float) -> str:
    """Formats a number of bytes, such as `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def nice_seconds(seconds: float) -> str:
    """Formats seconds as `1:02:03`, or as `2:03` if less than an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _values(metrics: StepMetrics) -> list[tuple[str, str]]:
    low, high = min(metrics.memory_nbytes), max(metrics.memory_nbytes)
    memory = (
        nice_nbytes(high)
        if nice_nbytes(low) == nice_nbytes(high)
        else f"{nice_nbytes(low)}-{nice_nbytes(high)}"
    )
    return [
        ("loss", f"{metrics.loss:.4f}"),
        ("lr", f"{metrics.lr:.2e}"),
        ("grad norm", f"{metrics.grad_norm:.3f}"),
        ("tokens/s", f"{metrics.tokens_per_s:,.0f}"),
        ("memory/rank", memory),
        ("ETA", nice_seconds(metrics.remaining_s)),
    ]
