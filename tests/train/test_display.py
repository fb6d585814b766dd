"""What a person sees of a run: numbers in words, and a panel no wider than the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardgrad.train.display import LiveDisplay, nice_nbytes, nice_seconds
from shardgrad.train.record import StepMetrics

METRICS = StepMetrics(
    3, 1.25, 1e-3, 0.5, 1234.5, (2**20, 3 * 2**20), elapsed_s=9.0, remaining_s=3723.4
)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0:00"), (59.6, "1:00"), (123, "2:03"), (3599, "59:59"), (3723, "1:02:03")],
)
def test_seconds_are_said_with_minutes_and_hours(seconds: float, words: str) -> None:
    assert nice_seconds(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 * 2**20, "3 MiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (2**42, "4096.00 GiB"),
    ],
)
def test_bytes_are_said_in_the_unit_that_fits(count: float, words: str) -> None:
    assert nice_nbytes(count) == words


@pytest.mark.parametrize(("terminal", "panel"), [(80, 80), (300, 100)])
def test_the_panel_has_the_metrics_and_fits_the_terminal(terminal: int, panel: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=terminal, color_system=None)
    with LiveDisplay(9, "tiny", console) as display:
        display.progress(METRICS)
    lines = screen.getvalue().splitlines()
    text = "\n".join(lines)
    for words in ("step 3 of 9", "1.2500", "1.00e-03", "1,234", "1 MiB-3 MiB", "1:02:03", "tiny"):
        assert words in text
    assert max(len(line.rstrip()) for line in lines if "step 3 of 9" in line) == panel
