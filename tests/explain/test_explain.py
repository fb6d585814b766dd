"""Traces of real and of made-up steps: what is read, replayed and said about them."""

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

from shardgrad.cli import main
from shardgrad.explain import changes
from shardgrad.explain.replay import replay
from shardgrad.explain.step import Op
from shardgrad.explain.traces import read_trace, write_trace
from shardgrad.train.failure import UsageError


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


def device_trace(*, with_waits: bool) -> list[dict[str, Any]]:
    """An all-gather, a matrix product that waits for it, and a reduction, as Kineto writes them. In
    us.
    """
    events = [
        event("ProfilerStep#3", "user_annotation", 0.0, 400.0),
        launch(1, 0.0),
        launch(2, 10.0, "cudaEventRecord"),
        launch(3, 15.0, "cudaStreamWaitEvent"),
        launch(4, 20.0),
        launch(5, 30.0),
        event(
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "kernel",
            10.0,
            100.0,
            stream=20,
            correlation=1,
            dtype="Float",
        ),
        event("ampere_sgemm_128x64_nn", "kernel", 112.0, 50.0, stream=7, correlation=4),
        event(
            "ncclDevKernel_ReduceScatter_f32",
            "kernel",
            165.0,
            80.0,
            stream=20,
            correlation=5,
            dtype="Float",
        ),
        launch(90, 900.0),
        event("of another step", "kernel", 950.0, 1.0, stream=7, correlation=90),
    ]
    if with_waits:
        wait = {
            "wait_on_stream": 20,
            "wait_on_cuda_event_record_corr_id": 2,
            "wait_on_cuda_event_id": 9,
        }
        events.append(
            event("Stream Wait Event", "cuda_sync", 15.0, 0.0, stream=7, correlation=3, **wait)
        )
    return events


def written(events: list[dict[str, Any]], path: Path) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.mark.parametrize("with_waits", [True, False])
def test_a_kernel_that_waits_for_a_collective_is_replayed_after_it(
    with_waits: bool, tmp_path: Path
) -> None:
    step = read_trace(written(device_trace(with_waits=with_waits), tmp_path / "trace.json"))
    assert [op.kind for op in step.ops] == ["all-gather", "compute", "reduce-scatter"]
    assert step.ops[1].after == (0,)
    assert ("inferred" in step.note) == (not with_waits)
    played = replay(step.ops)
    assert played.begins[1] == played.ends[0]
    assert played.bubbles()["all-gather"] == pytest.approx(played.begins[1])


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    content = json.dumps({"traceEvents": device_trace(with_waits=True)}).encode()
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(content))
    assert len(read_trace(tmp_path / "trace.json.gz").ops) == 3


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
    step = read_trace(tmp_path / "trace.json")
    kinds = {op.kind for op in step.ops}
    assert kinds == {"compute", "all-gather"}
    assert step.seconds == pytest.approx(replay(step.ops).seconds)
    assert any("mm" in op.name for op in step.ops)


def test_time_belongs_to_the_innermost_operation_of_the_busiest_thread(tmp_path: Path) -> None:
    outer = event("aten::linear", "cpu_op", 1000.0, 100.0)
    inner = event("aten::mm", "cpu_op", 1020.0, 50.0)
    elsewhere = event("aten::add", "cpu_op", 1000.0, 90.0) | {"tid": 1}
    step = read_trace(written([elsewhere, inner, outer], tmp_path / "trace.json"))
    assert [op.name for op in step.ops] == ["aten::linear", "aten::mm", "aten::linear"]
    assert [op.seconds for op in step.ops] == pytest.approx([20e-6, 50e-6, 30e-6])


def test_a_kernel_behind_another_of_its_stream_is_not_taken_to_wait_elsewhere(
    tmp_path: Path,
) -> None:
    """It began long after it was launched, when a collective ended: its stream was busy until
    then.
    """
    events = [
        *(launch(number, 5.0 * number) for number in (1, 2, 3)),
        event("ncclDevKernel_AllGather_f32", "kernel", 6.0, 94.0, stream=20, correlation=1),
        event("first", "kernel", 11.0, 89.0, stream=7, correlation=2),
        event("second", "kernel", 100.0, 20.0, stream=7, correlation=3),
    ]
    assert all(not op.after for op in read_trace(written(events, tmp_path / "trace.json")).ops)


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


def test_a_trace_whose_name_ends_in_gz_is_written_compressed_and_read_again(tmp_path: Path) -> None:
    step = read_trace(written(device_trace(with_waits=True), tmp_path / "trace.json"))
    write_trace(step, replay(step.ops), tmp_path / "out.json.gz")
    assert gzip.decompress((tmp_path / "out.json.gz").read_bytes()).startswith(b'{"traceEvents"')
    assert len(read_trace(tmp_path / "out.json.gz").ops) == len(step.ops)


def test_the_command_names_what_a_step_waits_for_and_fits_100_columns(tmp_path: Path) -> None:
    written(device_trace(with_waits=True), tmp_path / "trace.json")
    result = CliRunner().invoke(
        main, ["explain", str(tmp_path), "--perfetto", str(tmp_path / "out.json")]
    )
    assert result.exit_code == 0, result.output
    for words in (
        "critical path",
        "compute is idle, and waits for",
        "reductions in bf16",
        "links twice",
    ):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert len(read_trace(tmp_path / "out.json").ops) == 3
    values = json.loads(CliRunner().invoke(main, ["explain", str(tmp_path), "--json"]).stdout)
    assert values["exposed_s"] <= values["communication_s"]


def test_the_host_is_what_a_step_of_small_kernels_waits_for() -> None:
    ops = [Op(f"k{n}", "7", "compute", seconds=1e-6, launch_s=10e-6) for n in range(100)]
    played = replay(ops)
    assert played.seconds == pytest.approx(100 * 10e-6 + 1e-6)
    assert played.on_critical_path()["host"] == pytest.approx(1e-3)
    assert replay(changes.graphed(ops)).seconds == pytest.approx(10e-6 + 100 * 1e-6)


def test_a_step_without_a_duration_cannot_be_made_shorter() -> None:
    saved = changes.savings(
        [Op("a", "7", "compute", 0.0), Op("b", "20", "all-gather", 0.0, host_after=(0,))]
    )
    assert [(saving.change.name, saving.share) for saving in saved] == [("graphed", 0.0)]


def test_half_the_bytes_of_a_reduction_take_its_latency_as_before() -> None:
    """The shortest collective of the link shows it. Gathers, and what is bf16 already, stay as they
    are.
    """
    ops = [
        Op("r", "24", "reduce-scatter", 100e-6, link="x", dtype="fp32"),
        Op("g", "20", "all-gather", 4e-6, link="x", dtype="bf16"),
        Op("r", "24", "reduce-scatter", 100e-6, link="x", dtype="bf16"),
        Op("r", "25", "all-reduce", 3e-6, link="y", dtype="fp32"),
    ]
    changed = changes.half_precision_reductions(ops)
    assert [op.seconds for op in changed] == pytest.approx([52e-6, 4e-6, 100e-6, 3e-6])


def test_collectives_of_one_link_follow_each_other() -> None:
    ops = [
        Op("a", "20", "all-gather", 1.0, link="collectives"),
        Op("b", "24", "reduce-scatter", 1.0, link="collectives"),
    ]
    assert replay(ops).begins == (0.0, 1.0)


def test_one_more_prefetch_moves_an_all_gather_before_what_it_waited_behind() -> None:
    """Two layers whose all-gathers are launched between their kernels, by a slow host."""
    ops = [
        Op("gather 0", "20", "all-gather", 1.0, 0.1, link="x"),
        Op("layer 0", "7", "compute", 2.0, 0.1, after=(0,)),
        Op("gather 1", "20", "all-gather", 1.0, 0.1, after=(1,), link="x"),
        Op("layer 1", "7", "compute", 2.0, 0.1, after=(2,)),
    ]
    assert replay(ops).seconds == pytest.approx(6.1)
    changed = changes.one_more_prefetch(ops)
    assert [op.name for op in changed] == ["gather 0", "gather 1", "layer 0", "layer 1"]
    assert replay(changed).seconds == pytest.approx(5.1)
