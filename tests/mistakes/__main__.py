"""Writes the table of mistakes into the page about errors: `python -m tests.mistakes`."""

from __future__ import annotations

from tests.mistakes.page import PAGE, with_table

PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
