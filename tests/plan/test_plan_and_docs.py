"""What is said about plans is true: the page on scaling says what the planner says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_on_scaling_says_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, and the table of Muon; `python docs/scaling.py --check` looks at all, in minutes."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("scaling")
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.weak_row("8b FSDP 8", None) in page
    assert "\n".join(tables.muon_table()) in page
