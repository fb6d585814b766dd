"""What a person sees of a run: lines, and a bar below them on a terminal."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress

import pytest
from rich.console import Console

from shardgrad.programs.train.display import Display


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_note_is_a_line_and_a_terminal_has_a_bar_below_it(is_terminal: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=60, color_system=None)
    with redirect_stdout(screen), Display(9, "tiny", console=console) as display:
        display.note("a line")
        display.stepped(3)
    lines = screen.getvalue().splitlines()
    (at,) = (i for i, line in enumerate(lines) if "a line" in line)
    bars = [line for line in lines[at + 1 :] if "tiny" in line and "3/9" in line]
    assert bool(bars) == is_terminal


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(9, "tiny", leads=False) as display:
        display.note("words")
    assert capsys.readouterr().out == ""


def test_a_line_that_cannot_be_written_is_an_error_that_names_the_output() -> None:
    reader, unread = os.pipe()
    os.close(reader)
    for output in (unread, os.open("/dev/full", os.O_WRONLY)):
        stream = os.fdopen(output, "w")
        with redirect_stdout(stream), pytest.raises(OSError, match="'standard output'"):
            Display(10, "").note("a line")
        with suppress(OSError):  # the same again
            stream.close()
