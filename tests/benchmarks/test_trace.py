"""What is read from a profiler's trace."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engines.trace import Traffic, launches, traffic


def event(
    name: str, ts: float, dur: float, *, tid: int = 1, cat: str = "cpu_op", **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid, "cat": cat, "args": args}


def sized(
    name: str, ts: float, *dims: list[int], kind: str = "float", **args: Any
) -> dict[str, Any]:
    return event(name, ts, 1.0, **{"Input Dims": [*dims], "Input type": [kind] * len(dims)}, **args)


def test_the_span_around_an_exchange_tells_which_collective_it_stands_for() -> None:
    events = [
        event("FSDP::all_gather (x)", 110, 5, cat="user_annotation"),
        sized("c10d::alltoall_base_", 111, [4], [4]),
        event("FSDP::post_backward_reduce (x)", 150, 5, cat="user_annotation"),
        sized("c10d::alltoall_base_", 151, [4], [4]),
    ]
    found = traffic(events, rank=0, shards=2, replicas=1)
    assert found == {"all-gather": Traffic(1, 8), "reduce-scatter": Traffic(1, 8)}


def test_launches_are_what_the_host_gives_the_device() -> None:
    events = [
        event("cudaLaunchKernel", 111, 1, cat="cuda_runtime"),
        event("cudaStreamSynchronize", 112, 1, cat="cuda_runtime"),
        event("cuLaunchKernelEx", 151, 1, cat="cuda_driver"),
        event("gemm", 120, 10, cat="kernel"),
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
