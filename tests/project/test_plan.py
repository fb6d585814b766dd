"""What is said about plans is true: the benchmark runs, the page on scaling says what the planner says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.project.test_benchmarks import assert_spread, smoke

ROOT = Path(__file__).parents[2]


def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "docs" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_compares_memory_and_time(tmp_path: Path) -> None:
    record = smoke("plan", tmp_path, "--preset", "tiny")
    summary = record["summary"]
    for name in ("step_s", "predicted_step_s", "time_predicted_over_measured"):
        assert_spread(summary[name])
    assert len(record["samples"]["rounds"]) == record["config"]["rounds"]
    # A few MiB, beside which what a process takes for itself is not small.
    assert 0.3 < summary["memory_predicted_over_measured"] < 1.5


def test_the_page_on_scaling_says_what_the_planner_says() -> None:
    """One row; `python docs/scaling.py --check` looks at all of them, which takes minutes."""
    tables = scaling()
    row = tables.weak_row("8b FSDP 8", None)
    assert row in tables.PAGE.read_text(encoding="utf-8")
