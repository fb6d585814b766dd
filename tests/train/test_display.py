"""What a person sees of a run: numbers in words, and a bar on a terminal."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from shardgrad.programs.checkpoint.files import named_in_errors
from shardgrad.programs.train.display import Display, RunConsole


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_note_is_a_line_and_a_terminal_has_a_bar_below_it(is_terminal: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=60, color_system=None)
    with Display(9, "tiny", console=console) as display:
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


def test_a_full_disk_is_named_with_what_could_not_be_written() -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115
    display = Display(10, "", console=Console(file=full))
    with pytest.raises(OSError, match="'standard output'"), display:
        display.note("a line")
    with suppress(OSError):
        full.close()
    reader, writer = os.pipe()
    os.close(reader)
    unread = os.fdopen(writer, "w")
    with pytest.raises(OSError, match="Broken pipe: 'standard output'"):
        Display(10, "", console=RunConsole(file=unread)).note("a line")
    with pytest.raises(OSError, match="'/dev/full'"), named_in_errors("/dev/full"):
        Path("/dev/full").write_text("x")
