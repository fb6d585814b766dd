"""Raw records: one JSON object a line, with all that is needed to judge it or to make it again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


def environment() -> dict[str, Any]:
    """Code, versions and hardware. Ask at the start: the load tells whether the machine was quiet then."""
    # In a source tree of ours; a package inside somebody else's repository must not show that one's commit.
    is_ours = _git("rev-parse", "--show-toplevel") == str(_ROOT)
    changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results") if is_ours else None
    return {
        "git": _git("rev-parse", "HEAD") if is_ours else None,
        "git_is_clean": changes == "" if is_ours else None,
        "torch": version("torch"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def make_record(
    benchmark: str,
    *,
    environment: dict[str, Any],
    ops_backend: str,
    config: dict[str, Any],
    samples: Any,
    summary: Any,
) -> dict[str, Any]:
    """Puts a record together.

    Args:
        benchmark: the module's name.
        environment: as it was at the start.
        ops_backend: `compiled` or `reference`.
        config: every option that was in force.
        samples: raw measurements.
        summary: what is made of them.
    """
    return {
        "benchmark": benchmark,
        "environment": environment | {"ops_backend": ops_backend},
        "config": config,
        "samples": samples,
        "summary": summary,
    }


def append(folder: Path, record: dict[str, Any]) -> Path:
    """Adds a record to its benchmark's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['benchmark']}.jsonl"
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")
    return path


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=_ROOT, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
