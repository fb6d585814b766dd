"""Traces of real and of made-up steps: what is read, and what is said about them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardgrad.programs.cli import main
from shardgrad.programs.explain import Op, explain, exposed, read_trace
from shardgrad.programs.train.failure import UsageError


def event(name: str, category: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": ts,
        "dur": dur,
        "pid": 0,
        "tid": 0,
        "args": args,
    }


def launch(correlation: int, ts: float, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event(name, "cuda_runtime", ts, 5.0, correlation=correlation)


def device_trace() -> list[dict[str, Any]]:
    """An all-gather, a matrix product that waits for it, and a reduction, as Kineto writes them. In
    us.
    """
    return [
        event("ProfilerStep#3", "user_annotation", 0.0, 400.0),
        launch(1, 0.0),
        launch(4, 20.0),
        launch(5, 30.0),
        event("ncclDevKernel_AllGather_RING_LL()", "kernel", 10.0, 100.0, stream=20, correlation=1),
        event("ampere_sgemm_128x64_nn", "kernel", 112.0, 50.0, stream=7, correlation=4),
        event("ncclDevKernel_ReduceScatter_f32", "kernel", 150.0, 95.0, stream=20, correlation=5),
        launch(90, 900.0),
        event("of another step", "kernel", 950.0, 1.0, stream=7, correlation=90),
    ]


def written(events: list[dict[str, Any]], path: Path) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    content = json.dumps({"traceEvents": device_trace()}).encode()
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(content))
    assert len(read_trace(tmp_path / "trace.json.gz")) == 3


def test_a_profile_of_this_machine_is_cut_into_its_operations(tmp_path: Path) -> None:
    model, x = (
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
        torch.randn(512, 64),
    )
    model(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with torch.profiler.record_function("FSDP::all_gather (0)"):
            torch.randn(64, 64) @ torch.randn(64, 64)
        model(x).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    ops = read_trace(tmp_path / "trace.json")
    assert {op.kind for op in ops} == {"compute", "all-gather"}
    found = explain(ops)
    assert 0 < found.exposed_s == pytest.approx(found.communication_s)
    assert found.compute_s + found.exposed_s == pytest.approx(found.step_s)
    assert any("mm" in op.name for op in ops)


def test_time_belongs_to_the_innermost_operation_of_the_busiest_thread(tmp_path: Path) -> None:
    outer = event("aten::linear", "cpu_op", 1000.0, 100.0)
    inner = event("aten::mm", "cpu_op", 1020.0, 50.0)
    elsewhere = event("aten::add", "cpu_op", 1000.0, 90.0) | {"tid": 1}
    ops = read_trace(written([elsewhere, inner, outer], tmp_path / "trace.json"))
    assert [op.name for op in ops] == ["aten::linear", "aten::mm", "aten::linear"]
    assert [op.end_s - op.begin_s for op in ops] == pytest.approx([20e-6, 50e-6, 30e-6])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no Chrome trace"),
        (b"[1, 2]", "no list of traceEvents"),
        (b'{"traceEvents": 3}', "no list of traceEvents"),
        (b'{"traceEvents": []}', "has no operation"),
        (b"[" * 100_000, "is no Chrome trace"),
        (b'[{"ph": "X", "cat": "kernel", "ts": "a", "dur": null}]', "has no operation"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_a_sentence(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_trace(path)
    result = CliRunner().invoke(main, ["explain", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("shardgrad explain: ")
    assert "Traceback" not in result.output


def test_a_folder_without_a_trace_says_how_to_make_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["explain", str(tmp_path)])
    assert result.exit_code == 2
    assert "shardgrad train --profile STEP" in result.stderr


def test_the_command_names_what_a_step_waits_for_and_fits_100_columns(tmp_path: Path) -> None:
    written(device_trace(), tmp_path / "trace.json")
    result = CliRunner().invoke(main, ["explain", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for words in ("exposed communication", "compute waits for: all-gather", "ampere_sgemm"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    values = json.loads(CliRunner().invoke(main, ["explain", str(tmp_path), "--json"]).stdout)
    assert values["step_s"] == pytest.approx(245e-6)
    assert values["compute_s"] == pytest.approx(50e-6)
    assert values["communication_s"] == pytest.approx(195e-6)
    assert values["exposed_s"] == pytest.approx(195e-6 - 12e-6)
    assert values["waits_s"] == pytest.approx({"all-gather": 112e-6, "reduce-scatter": 83e-6})


def test_the_host_is_what_a_step_of_small_kernels_waits_for() -> None:
    ops = [Op(f"k{n}", "7", "compute", 10e-6 * n, 10e-6 * n + 1e-6) for n in range(100)]
    assert explain(ops).waits_s == {"host": pytest.approx(99 * 9e-6)}


def test_what_runs_beside_compute_is_not_exposed() -> None:
    assert exposed([(0, 2), (1, 3), (9, 10)], [(1, 2), (2.5, 9.5)]) == pytest.approx(2.0)
    assert exposed([], [(0, 1)]) == exposed([(0, 1)], [(0, 1)]) == 0
