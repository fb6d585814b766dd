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
from benchmarks.readme import BEGIN, END, FIGURES, front, pages, records_in, replaced
from benchmarks.records import is_result
from tests.benchmarks.fake_engines import HARDWARE

NAMES = (
    *("fsdp2", "shardgrad", "shardgrad-graphed", "fsdp2-keep", "ddp", "fsdp2-compiled"),
    *("compute", "collectives"),
)


def make_record() -> dict[str, Any]:
    """A record of several engines."""
    outcome = Outcome()
    outcome.hardware = HARDWARE
    for number, name in enumerate(NAMES, start=1):
        observation = Observation(100, 2**26, traffic={"all-gather": Traffic(3, 1000)})
        costs = [Cost(number / 100 * (1 + i / 100), 0.01, 1e6) for i in range(40)]
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
    return record_of(Task(), Length(), NAMES, outcome, started)


def changed(**environment: Any) -> dict[str, Any]:
    record = make_record()
    return record | {"environment": record["environment"] | environment}


def test_the_tables_are_made_of_records_that_count(tmp_path: Path) -> None:
    noisy, dirty, loud = make_record(), changed(git_is_clean=False), changed(load_before=2.0)
    noisy["summary"]["shardgrad"]["wall_s"] = {"median": 1.0, "quartiles": [0.5, 1.0]}
    of_gpu = changed(device_name="a GPU")
    records = [noisy, make_record(), dirty, loud, of_gpu]
    lines = "\n".join(map(json.dumps, records))
    (tmp_path / "training_step.jsonl").write_text(lines, encoding="utf-8")
    found = list(filter(is_result, records_in(tmp_path)))
    assert found == json.loads(json.dumps([make_record(), of_gpu]))
    text = "\n".join(front(found))
    # The engines' times are 10, 20, 30 and 80 ms.
    assert "| step: tiny, fp32, 2 ranks, 8 x 128 tokens each | 2 | 3 | 8 |" in text
    assert "| step on a GPU: tiny, fp32, 2 ranks, 8 x 128 tokens each | 2 | 3 | 8 |" in text
    assert "Measured at commit 0123456789 on 2 cores of a processor and on a GPU." in text
    assert (
        replaced(f"before\n{BEGIN}\nold\n{END}\nafter", text)
        == f"before\n{BEGIN}\n{text}\n{END}\nafter"
    )
    first, second = make_record(), make_record()
    del first["summary"]["collectives"], second["summary"]["shardgrad"]
    assert list(front([first, second])) == list(front([make_record()])), "completed by the second"
    with pytest.raises(ValueError, match="lacks the marks"):
        replaced("no marks", text)


def test_the_tables_are_up_to_date() -> None:
    for page, fresh in pages(list(filter(is_result, records_in(*FIGURES)))).items():
        text = page.read_text(encoding="utf-8")
        assert replaced(text, fresh) == text, f"{page} is out of date: make figures"
