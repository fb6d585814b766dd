"""The tables of benchmarks/README.md are made of records, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.comparison import Measured, Outcome
from benchmarks.engines.summary import record_of
from benchmarks.engines.task import Length, Task
from benchmarks.engines.trace import Observation, Traffic
from benchmarks.measure import Cost
from benchmarks.readme import BEGIN, END, README, newest, replaced, results, tables
from benchmarks.records import RESULTS

NAMES = (
    "fsdp2",
    "shardgrad",
    "shardgrad-graphed",
    "fsdp2-keep",
    "fsdp1",
    "ddp",
    "compute",
    "collectives",
)


def make_record(*, task: Task | None = None) -> dict[str, Any]:
    """A record of several engines."""
    outcome = Outcome()
    outcome.hardware = {
        "ops_backend": "compiled",
        "matmul_flops_per_s": 1e9,
        "model": {
            "numel": 10,
            "units": 2,
            "attention_numel": 0,
            "vocab_size": 256,
        },
    }
    for number, name in enumerate(NAMES, start=1):
        observation = Observation(100, 2**26, traffic={"all-gather": Traffic(3, 1000)})
        costs = [Cost(number / 100 * (1 + i / 100), 0.01, 1.0, 1e6) for i in range(40)]
        outcome.measured[name] = Measured(costs, rounds=[*range(40)], observations=[observation])
    started = {
        "git": "0123456789abcdef",
        "git_is_clean": True,
        "torch": "2.13.0",
        "cpu": "a processor",
        "cores": 2,
        "load_average_1min": 0.1,
        "time": "now",
    }
    return record_of(task or Task(), Length(), NAMES, outcome, started)


def with_time(time: str, **environment: Any) -> dict[str, Any]:
    record = make_record()
    return record | {
        "environment": record["environment"]
        | {"time": time, "ops_backend": "compiled"}
        | environment
    }


def written(folder: Path, records: list[dict[str, Any]], name: str = "bench") -> Path:
    """Writes records where results lie; returns the folder of results."""
    results = folder / "benchmarks" / "results"
    (results / "a").mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (results / "a" / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return results


def test_the_tables_are_made_of_records_that_count(tmp_path: Path) -> None:
    noisy = with_time("5")
    of = noisy["summary"]["shardgrad"]
    loud = {"wall_s": {"median": 1.0, "quartiles": [0.5, 1.0]}}
    noisy["summary"] = noisy["summary"] | {"shardgrad": of | loud}
    changed = with_time("6", git_is_clean=False)
    found = newest(
        results(
            written(
                tmp_path, [with_time("2", cores=4), with_time("3"), with_time("1"), noisy, changed]
            )
        )
    )
    assert [record["environment"]["time"] for _, record in found] == ["3", "2"]
    text = "\n".join(tables(found))
    # The engines' times are 10, 20 and 80 ms; memory is alike.
    assert (
        "| tiny, fp32, 2 ranks, 8 x 128 tokens each | 2 cores, a processor | 11.95 | 2.00 (2.00 .. "
        "2.00) |"
    ) in text
    assert "| 0.25 | 1.00 | [record](results/a/bench.jsonl) |" in text
    assert (
        replaced(f"before\n{BEGIN}\nold\n{END}\nafter", text)
        == f"before\n{BEGIN}\n{text}\n{END}\nafter"
    )
    with pytest.raises(ValueError, match="lacks the marks"):
        replaced("no marks", text)


def test_the_tables_are_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert replaced(text, "\n".join(tables(newest(results(RESULTS))))) == text
