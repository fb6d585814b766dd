"""One step under torch's profiler: the collectives that it calls, and what it launches."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Event = Mapping[str, Any]

_ENGINE = "FSDP::"
_COLLECTIVE = "c10d::"
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
_KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "reduce_": "all-reduce",
    "broadcast_": "all-gather",
}
_ITEMSIZES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "int": 4}


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step.

    Attributes:
        count: calls.
        nbytes: what this rank sends, by the arithmetic of rings: (N - 1) / N of what is gathered or
            reduced, twice that for an all-reduce.
    """

    count: int
    nbytes: int


@dataclass(frozen=True)
class Observation:
    """Of one rank.

    Attributes:
        baseline_rss_nbytes: peak resident memory before there was a model: imports and process
            group.
        peak_rss_nbytes: peak resident memory after all rounds.
        peak_allocated_nbytes: of the device, by torch's allocator; None on a CPU.
        peak_reserved_nbytes: likewise, with what the allocator keeps.
        pool_nbytes: of it, by graphs.
        launches: how often the host gave the device something to do in one step; None on a CPU.
        traffic: by kind of collective, in one step.
    """

    baseline_rss_nbytes: int
    peak_rss_nbytes: int
    peak_allocated_nbytes: int | None = None
    peak_reserved_nbytes: int | None = None
    pool_nbytes: int = 0
    launches: int | None = None
    traffic: dict[str, Traffic] = field(default_factory=dict)


def trace(
    step: Callable[[], object], device: torch.device, path: Path | None = None
) -> list[dict[str, Any]]:
    """Runs one step under the profiler and returns the events of its Chrome trace, with shapes.

    Where the profiler cannot start (some containers forbid it), the step is taken all the same, and
    there are no events.

    Args:
        step: what to run.
        device: of this rank.
        path: where the trace is kept, for Perfetto.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, record_shapes=True)
    try:
        profiler.start()
    except RuntimeError:
        step()
        return []
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    profiler.stop()
    with tempfile.TemporaryDirectory(prefix="shardgrad-benchmark-") as folder:
        path = path or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def launches(events: Iterable[Event]) -> int:
    """Counts how often the host gave the device something to do."""
    return sum(
        str(event.get("name", "")).startswith(_LAUNCHES)
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    )


def traffic(
    events: Sequence[Event], *, rank: int, shards: int, replicas: int
) -> dict[str, Traffic]:
    """Counts the collectives that the host launched in a step, by kind, and what this rank sends
    for them.

    Args:
        events: with shapes.
        rank: among the shards.
        shards: ranks that share parameters.
        replicas: groups of shards; more than one reduce among each other.
    """
    found: dict[str, Traffic] = {}
    for event, kind in _calls([event for event in events if event.get("ph") == "X"]):
        ranks = replicas if kind == "all-reduce" and replicas > 1 else shards
        before = found.get(kind, Traffic(0, 0))
        found[kind] = Traffic(
            before.count + 1, before.nbytes + _sent_nbytes(event, kind, rank, ranks)
        )
    return found


def _calls(events: Sequence[Event]) -> list[tuple[Event, str]]:
    """The collectives that the host launched, with their kinds."""
    spans = [event for event in events if str(event["name"]).startswith(_ENGINE)]
    found = []
    for event in events:
        operation = str(event["name"]).removeprefix(_COLLECTIVE)
        if operation == "alltoall_base_":  # shardgrad's exchange: the span around it tells what for
            around = " ".join(span["name"] for span in spans if _contains(span, event))
            found.append((event, "reduce-scatter" if "reduce" in around else "all-gather"))
        elif operation in _KINDS:
            found.append((event, _KINDS[operation]))
    return found


def _contains(outer: Event, inner: Event) -> bool:
    ended = outer["ts"] + outer.get("dur", 0.0)
    return outer.get("tid") == inner.get("tid") and outer["ts"] <= inner["ts"] <= ended


def _sent_nbytes(event: Event, kind: str, rank: int, ranks: int) -> int:
    sizes = [nbytes for nbytes in _sizes(event) if nbytes]
    if not sizes:
        return 0
    if event["name"].endswith("alltoall_base_"):
        splits = _splits(event) or [1] * ranks
        return sizes[1] * (sum(splits) - splits[rank]) // sum(splits)
    if kind == "all-reduce":
        return 2 * max(sizes) * (ranks - 1) // ranks
    return min(sizes) * (ranks - 1)  # the chunk that one rank has before, or after


def _splits(event: Event) -> list[int]:
    """How an all-to-all divides what it sends; nothing where evenly."""
    inputs = event.get("args", {}).get("Concrete Inputs", [])
    return [int(number) for number in re.findall(r"\d+", inputs[4])] if len(inputs) > 4 else []


def _sizes(event: Event) -> Iterator[int]:
    """Bytes of each tensor argument; a list of tensors counts as one."""
    arguments = event.get("args", {})
    for dims, kind in zip(
        arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False
    ):
        names = set(kind) if isinstance(kind, list) else {kind}
        itemsize = max(
            (_ITEMSIZES.get(name, 4 if name == "TensorList" else 0) for name in names), default=0
        )
        yield _numel(dims) * itemsize


def _numel(dims: Any) -> int:
    if not isinstance(dims, list) or not dims:
        return 0
    if isinstance(dims[0], list):
        return sum(_numel(each) for each in dims)
    return math.prod(dims)
