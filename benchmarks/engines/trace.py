"""One step under torch's profiler: what is in it by lanes, its collectives and its launches.

Its Chrome trace is read here, and not by a library: HolisticTraceAnalysis and torch's own summaries
know what a GPU did by NCCL, and neither gloo's transfers nor which collective an all-to-all stands
for.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

LANES = ("compute", "all-gather", "reduce-scatter", "all-reduce", "optimizer", "engine")
STEP = "benchmarks step"  # the name under which the step itself is recorded

Event = Mapping[str, Any]
Interval = tuple[float, float]

_ENGINE = "FSDP::"
_OPTIMIZER = "Optimizer.step#"
_COLLECTIVE = "c10d::"
_ANNOTATION = "gpu_user_annotation"  # a span of the host, as the device saw it
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
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
class Span:
    """Something that took time on one rank.

    Attributes:
        lane: one of `LANES`.
        name: of the operation, kernel or collective.
        start_us: since the beginning of the step.
        length_us: how long.
    """

    lane: str
    name: str
    start_us: float
    length_us: float


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
        dtensors: constructed from Python in one steady step.
        launches: how often the host gave the device something to do in one step; None on a CPU.
        traffic: by kind of collective, in one step.
        timeline: of one steady step; empty on all ranks but the first.
        dropped: spans that the timeline leaves out, the shortest.
        communication_s: seconds in which the timeline shows a collective under way;
        exposed_s: those of them in which nothing was computed on this rank.
    """

    baseline_rss_nbytes: int
    peak_rss_nbytes: int
    peak_allocated_nbytes: int | None = None
    peak_reserved_nbytes: int | None = None
    pool_nbytes: int = 0
    dtensors: int = 0
    launches: int | None = None
    traffic: dict[str, Traffic] = field(default_factory=dict)
    timeline: list[Span] = field(default_factory=list)
    dropped: int = 0
    communication_s: float = 0.0
    exposed_s: float = 0.0


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
    with record_function(STEP):
        step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    profiler.stop()
    with tempfile.TemporaryDirectory(prefix="shardgrad-benchmark-") as folder:
        path = path or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


@contextmanager
def counting_dtensors() -> Iterator[list[int]]:
    """Counts in the only element of the list it gives; wrappers that C++ makes do not count."""
    original, count = DTensor.__new__, [0]

    def counting(*args: Any, **kwargs: Any) -> DTensor:
        count[0] += 1
        return original(*args, **kwargs)

    with mock.patch.object(DTensor, "__new__", staticmethod(counting)):
        yield count


# -- lanes


def lanes(events: Sequence[Event]) -> list[Span]:
    """Sorts what happened in a step into lanes, in the order of time.

    On a GPU, lanes hold what the device did. On a CPU they hold operators, gloo's transfers from
    their launch to their arrival, and the engine's hooks (waiting included), which may overlap what
    they call.

    Args:
        events: of the profiler's Chrome trace; one is the step itself. Without it there are no
            lanes.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    steps = [event for event in _named(complete, STEP) if event.get("cat") != _ANNOTATION]
    if not steps:
        return []
    began_us, ended_us = _interval(steps[0])
    on_device = [event for event in complete if event.get("cat") in _ON_DEVICE]
    found = [*_device_lanes(on_device, complete)] if on_device else [*_host_lanes(complete)]
    found += [
        (event, "engine")
        for event in _outermost(_named(complete, _ENGINE))
        if event.get("cat") != _ANNOTATION
    ]
    return sorted(
        (
            Span(
                lane,
                str(event["name"]),
                round(event["ts"] - began_us, 3),
                round(event.get("dur", 0.0), 3),
            )
            for event, lane in found
            if event["ts"] >= began_us and (on_device or event["ts"] <= ended_us)
        ),
        key=lambda span: span.start_us,
    )


def _host_lanes(events: Sequence[Event]) -> Iterator[tuple[Event, str]]:
    optimizer = _outermost(_named(events, _OPTIMIZER))
    for event in optimizer:
        yield event, "optimizer"
    operators = _outermost(
        [event for event in _named(events, "aten::") if event.get("cat") == "cpu_op"]
    )
    own = [*optimizer, *_named(events, _ENGINE)]
    for event in operators:
        if not any(_contains(outer, event) for outer in own):
            yield event, "compute"
    transfers = sorted(_named(events, "gloo:"), key=lambda event: event["ts"])
    calls = _calls(events)
    for number, event in enumerate(transfers):
        # gloo records a transfer from its launch on, so both lists have the same order.
        kind = (
            calls[number][1]
            if len(calls) == len(transfers)
            else _kind(event["name"].removeprefix("gloo:"))
        )
        yield event, kind


def _device_lanes(
    events: Sequence[Event], everything: Sequence[Event]
) -> Iterator[tuple[Event, str]]:
    steps = _outermost(_named(everything, _OPTIMIZER))
    launched_by_optimizer = {
        event["args"]["correlation"]
        for event in everything
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
        and any(_contains(outer, event) for outer in steps)
    }
    for event in events:
        name = str(event["name"])
        if "nccl" in name.lower():
            yield event, _kind(name)
        elif (
            event.get("args", {}).get("correlation") in launched_by_optimizer
            or "adam" in name.lower()
        ):
            yield event, "optimizer"
        else:
            yield event, "compute"


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


def launches(events: Iterable[Event]) -> int:
    """Counts how often the host gave the device something to do."""
    return sum(
        str(event.get("name", "")).startswith(_LAUNCHES)
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    )


def _calls(events: Sequence[Event]) -> list[tuple[Event, str]]:
    """The collectives that the host launched, in order, with their kinds."""
    engine = _named(events, _ENGINE)
    found = []
    for event in sorted(_named(events, _COLLECTIVE), key=lambda event: event["ts"]):
        operation = event["name"].removeprefix(_COLLECTIVE)
        if operation == "alltoall_base_":  # shardgrad's exchange: the span around it tells what for
            around = " ".join(outer["name"] for outer in engine if _contains(outer, event))
            found.append((event, "reduce-scatter" if "reduce" in around else "all-gather"))
        elif operation in _KINDS:
            found.append((event, _KINDS[operation]))
    return found


def _kind(name: str) -> str:
    plain = re.sub(r"[^a-z]", "", name.lower())
    for words, kind in (
        ("allgather", "all-gather"),
        ("reducescatter", "reduce-scatter"),
        ("broadcast", "all-gather"),
    ):
        if words in plain:
            return kind
    return "all-reduce"


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


# -- intervals


def covered_us(spans: Iterable[Span], *, lanes: Sequence[str]) -> float:
    """Microseconds in which at least one of the lanes is busy."""
    return sum(end - start for start, end in _union(spans, lanes))


def uncovered_us(spans: Sequence[Span], *, lanes: Sequence[str], beside: Sequence[str]) -> float:
    """Microseconds in which one of `lanes` is busy and none of `beside`."""
    both = covered_us(spans, lanes=[*lanes, *beside])
    return both - covered_us(spans, lanes=beside)


def shortened(spans: Sequence[Span], most: int) -> tuple[list[Span], int]:
    """The longest `most` spans in the order of time, and how many were left out."""
    if len(spans) <= most:
        return list(spans), 0
    kept = sorted(spans, key=lambda span: span.length_us, reverse=True)[:most]
    return sorted(kept, key=lambda span: span.start_us), len(spans) - most


def _union(spans: Iterable[Span], wanted: Sequence[str]) -> list[Interval]:
    found: list[Interval] = []
    for span in sorted((one for one in spans if one.lane in wanted), key=lambda one: one.start_us):
        start, end = span.start_us, span.start_us + span.length_us
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _named(events: Iterable[Event], start: str) -> list[Event]:
    return [event for event in events if str(event.get("name", "")).startswith(start)]


def _interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def _contains(outer: Event, inner: Event) -> bool:
    if outer is inner or outer.get("tid") != inner.get("tid"):
        return False
    (start, end), (first, last) = _interval(outer), _interval(inner)
    return start <= first and last <= end


def _outermost(events: Sequence[Event]) -> list[Event]:
    """Those that lie in no other of them, thread by thread."""
    found: list[Event] = []
    ends: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -float(event.get("dur", 0.0)))):
        start, end = _interval(event)
        if start >= ends.get(event.get("tid"), -math.inf):
            found.append(event)
            ends[event.get("tid")] = end
    return found
