"""What is read from a profiler's trace."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engines.trace import (
    STEP,
    Span,
    Traffic,
    covered_us,
    lanes,
    launches,
    traffic,
    uncovered_us,
)


def event(
    name: str, ts: float, dur: float, *, tid: int = 1, cat: str = "cpu_op", **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid, "cat": cat, "args": args}


def sized(
    name: str, ts: float, *dims: list[int], kind: str = "float", **args: Any
) -> dict[str, Any]:
    return event(name, ts, 1.0, **{"Input Dims": [*dims], "Input type": [kind] * len(dims)}, **args)


STEP_EVENT = event(STEP, 100.0, 100.0, cat="user_annotation")


def test_operators_within_operators_and_within_the_engine_are_not_counted_twice() -> None:
    events = [
        STEP_EVENT,
        event("aten::linear", 110, 10),
        event("aten::mm", 112, 5),
        event("FSDP::pre_forward (layers.0)", 130, 20, cat="user_annotation"),
        event("aten::copy_", 131, 5),
        event("Optimizer.step#AdamW.step", 160, 20, cat="user_annotation"),
        event("aten::_fused_adamw_", 161, 15),
        event("aten::add", 20, 5),  # before the step
    ]
    assert [(span.lane, span.name, span.start_us) for span in lanes(events)] == [
        ("compute", "aten::linear", 10),
        ("engine", "FSDP::pre_forward (layers.0)", 30),
        ("optimizer", "Optimizer.step#AdamW.step", 60),
    ]


def test_a_transfer_of_gloo_gets_the_kind_of_the_call_that_launched_it() -> None:
    events = [
        STEP_EVENT,
        event("FSDP::all_gather (x)", 110, 5, cat="user_annotation"),
        sized("c10d::alltoall_base_", 111, [4], [4]),
        event("gloo:all_to_all", 112, 30, tid=7),
        event("FSDP::post_backward_reduce (x)", 150, 5, cat="user_annotation"),
        sized("c10d::alltoall_base_", 151, [4], [4]),
        event("gloo:all_to_all", 152, 30, tid=8),
    ]
    kinds = [span.lane for span in lanes(events) if span.name == "gloo:all_to_all"]
    assert kinds == ["all-gather", "reduce-scatter"]


def test_on_a_gpu_lanes_show_what_the_device_did() -> None:
    events = [
        STEP_EVENT,
        event("aten::mm", 110, 5),
        event("cudaLaunchKernel", 111, 1, cat="cuda_runtime", correlation=1),
        event("Optimizer.step#AdamW.step", 150, 10, cat="user_annotation"),
        event("cudaLaunchKernel", 151, 1, cat="cuda_runtime", correlation=2),
        event("gemm", 120, 10, tid=9, cat="kernel", correlation=1),
        event(
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
            125,
            10,
            tid=10,
            cat="kernel",
            correlation=3,
        ),
        event("ncclDevKernel_AllGather_RING_LL", 105, 10, tid=10, cat="kernel", correlation=4),
        event(
            "multi_tensor", 250, 10, tid=9, cat="kernel", correlation=2
        ),  # after the host has returned
    ]
    assert [span.lane for span in lanes(events)] == [
        "all-gather",
        "compute",
        "reduce-scatter",
        "optimizer",
    ]
    assert launches(events) == 2


@pytest.mark.parametrize(
    ("call", "kind", "nbytes"),
    [
        (sized("c10d::_allgather_base_", 1, [4000], [1000]), "all-gather", 3 * 4000),
        (
            sized("c10d::_reduce_scatter_base_", 1, [1000], [4000], kind="c10::BFloat16"),
            "reduce-scatter",
            6000,
        ),
        (sized("c10d::alltoall_base_", 1, [4000], [4000]), "all-gather", 12000),
        (sized("c10d::allreduce_", 1, [[[1000], [1000]]], kind="TensorList"), "all-reduce", 12000),
    ],
)
def test_bytes_that_a_rank_of_four_sends(call: dict[str, Any], kind: str, nbytes: int) -> None:
    assert traffic([call], rank=0, shards=4, replicas=1) == {kind: Traffic(1, nbytes)}


def test_an_exchange_of_two_sends_what_its_splits_say() -> None:
    inputs = ["", "", "", "[0, 1000]", "[0, 1000]", "True", "-1"]
    call = sized("c10d::alltoall_base_", 1, [1000], [1000], **{"Concrete Inputs": inputs})
    assert traffic([call], rank=0, shards=2, replicas=1) == {"all-gather": Traffic(1, 4000)}


def test_replicas_reduce_among_each_other() -> None:
    call = sized("c10d::allreduce_", 1, [[[1000]]], kind="TensorList")
    assert traffic([call], rank=0, shards=4, replicas=2) == {"all-reduce": Traffic(1, 4000)}


def test_communication_counts_as_exposed_only_where_nothing_is_computed() -> None:
    spans = [
        Span("all-gather", "a", 0, 10),
        Span("reduce-scatter", "b", 5, 10),
        Span("compute", "c", 8, 4),
        Span("optimizer", "d", 30, 5),
    ]
    assert covered_us(spans, lanes=["all-gather", "reduce-scatter"]) == 15
    assert (
        uncovered_us(spans, lanes=["all-gather", "reduce-scatter"], beside=["compute", "optimizer"])
        == 11
    )
