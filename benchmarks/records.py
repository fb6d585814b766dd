"""Records: one JSON object a line, with all that is needed to judge a measurement or to make it
again.

| key | what it holds |
| --- | --- |
| `benchmark` | its name |
| `environment` | commit, whether the tree was clean, versions, hardware, load, ops |
| `config` | every option that was in force |
| `samples` | every value that was measured |
| `summary` | what is reported, medians with quartiles, ratios, counts; innermost are rows |

Records of `training_step` have more: see `benchmarks/training_step.py`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.noise import verdict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Record = Mapping[str, Any]


def environment() -> dict[str, Any]:
    """Code, versions and hardware. Ask at the start: the load tells whether the machine was quiet
    then.
    """
    import shardgrad.ops

    # In our own source tree; inside another project's repository, its commit must not be taken for
    # ours.
    is_ours = _git("rev-parse", "--show-toplevel") == str(ROOT)
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
        "ops_backend": shardgrad.ops.backend(),
    }


def append(folder: Path, record: Record) -> Path:
    """Adds a record to its benchmark's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['benchmark']}.jsonl"
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")
    return path


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file.

    Raises:
        ValueError: a line is not a record; says which.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON ({error}): give files of records"
            ) from error
        if not isinstance(record, dict) or not {"benchmark", "config", "summary"} <= set(record):
            raise ValueError(
                f"{path}, line {number} is not a record of a benchmark: leave the file out"
            )
        yield record


def is_result(record: Record) -> bool:
    """Whether a record counts as a result, by the rules of docs/how_to/benchmark.md."""
    environment, config = record["environment"], record["config"]
    return bool(
        environment["git_is_clean"]
        and environment.get("ops_backend") == "compiled"
        and not config.get("smoke")
        and not config.get("share_device")
        and verdict(record)[0]
    )


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
