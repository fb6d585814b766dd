"""Every benchmark runs, and leaves the record that benchmarks/README.md promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.programs import run

TIMEOUT_S = 100  # several times what a smoke run takes


def smoke(benchmark: str, out: Path) -> dict[str, Any]:
    """Runs a benchmark and returns its one record."""
    done = run("benchmarks", benchmark, "--smoke", "--out", out, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads((out / f"{benchmark}.jsonl").read_text(encoding="utf-8"))
    assert set(record) == {"benchmark", "environment", "config", "samples", "summary"}
    assert (record["benchmark"], record["config"]["smoke"]) == (benchmark, True)
    return record


def assert_spread(spread: dict[str, Any]) -> None:
    low, high = spread["quartiles"]
    assert low <= spread["median"] <= high


def test_kernels(tmp_path: Path) -> None:
    record = smoke("kernels", tmp_path)
    cases = {case.split()[0] for case in record["summary"]}
    assert cases == {"pack", "unpack", "sum", "adam_", "sgd_", "norm_"}
    for by_name in record["summary"].values():
        assert by_name.keys() >= {"copy", "reference", "compiled"}
        for of in by_name.values():
            assert_spread(of["bytes_per_s"])


def test_send_weights(tmp_path: Path) -> None:
    record = smoke("send_weights", tmp_path)
    way = record["summary"]["send_weights"]
    for field in ("wall_s", "cpu_s", "ratio_to_gather and broadcast"):
        assert_spread(way[field])
    # Every receiver's norms are whole, all else is cut in two.
    nbytes = 2 * record["config"]["parameters"] + 2 * 2 * 32
    assert record["config"]["planned_nbytes"] == nbytes
    assert way["loopback_nbytes"]["median"] > nbytes
