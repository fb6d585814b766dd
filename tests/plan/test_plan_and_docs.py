"""What is said about plans is true: the page on scaling says what the planner says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_on_scaling_says_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row; `python docs/scaling.py --check` looks at all of them, which takes minutes."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("scaling")
    row = tables.weak_row("8b FSDP 8", None)
    assert row in tables.PAGE.read_text(encoding="utf-8")
