"""Reads a trace of `torch.profiler`: communication that is exposed, and what compute waits for.

One definition, here and in `shardgrad plan`: communication is *exposed* while a collective runs and
no kernel of the compute stream does.

A trace of a CPU has no streams: the thread with most operations is the step, cut into intervals by
the innermost operation, and by the engine's spans around it. Only exposed time is found there.

For more than that (idle time by kind, critical paths, many ranks), give the same trace to Holistic
Trace Analysis.
"""

from __future__ import annotations

import bisect
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardgrad.programs.train.config import read_regular
from shardgrad.programs.train.failure import UsageError

__all__ = ["Explained", "Op", "explain", "exposed", "read_trace"]

_NBYTES = 2 * 2**30  # of a trace, uncompressed
_US = 1e-6
_MOST_US = 1e15  # thirty years, in which sums and quotients of times stay finite
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_SLACK_S = 20e-6  # between the end of what was waited for and the begin of what waited
_MOST_NAMES = 8
# What a name says about a collective; underscores and hyphens are removed first.
_COLLECTIVES = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "sendrecv": "exchange",
    "alltoall": "exchange",
}
# A span of the engine, for operations of the CPU inside it.
_ENGINE_SPANS = {
    "FSDP::all_gather_copy_out": "copy",
    "FSDP::all_gather": "all-gather",
    "FSDP::post_backward_reduce": "reduce-scatter",
    "FSDP::root_post_backward": "reduce-scatter",
}

_Event = Mapping[str, Any]
_Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of a step.

    Attributes:
        name: name, as in the trace.
        lane: the stream that runs it; "host" for a CPU.
        kind: "compute", "copy", or the kind of the collective, such as "all-gather".
        begin_s: start, in seconds since the start of the step.
        end_s: end, in seconds since the start of the step.
    """

    name: str
    lane: str
    kind: str
    begin_s: float
    end_s: float

    @property
    def is_collective(self) -> bool:
        """Whether ranks communicate in it."""
        return self.kind in _COLLECTIVES.values()


@dataclass(frozen=True)
class Explained:
    """Where the time of a step goes, in seconds.

    Attributes:
        step_s: from the first launch to the last end.
        compute_s: the compute stream, that with most compute, is busy.
        communication_s: at least one collective runs.
        exposed_s: the part of it in which the compute stream is not busy.
        waits_s: the compute stream is idle, by the kind of operation that ended before it went on;
            "host" if none did.
        largest_s: the names with most time, and their time.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    waits_s: Mapping[str, float]
    largest_s: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


def exposed(moved: Iterable[_Interval], busy: Iterable[_Interval]) -> float:
    """Returns the length of the intervals `moved`, together, in which no interval of `busy` is."""
    computing = _union(busy)
    return _length(_union([*computing, *moved])) - _length(computing)


def explain(ops: Sequence[Op]) -> Explained:
    """Returns where the time of a step goes."""
    by_lane: dict[str, float] = {}
    by_name: dict[str, float] = {}
    for op in ops:
        computed = op.end_s - op.begin_s if op.kind == "compute" else 0.0
        by_lane[op.lane] = by_lane.get(op.lane, 0.0) + computed
        by_name[op.name] = by_name.get(op.name, 0.0) + op.end_s - op.begin_s
    lane = max(by_lane, key=lambda name: by_lane[name])
    busy = [(op.begin_s, op.end_s) for op in ops if op.lane == lane and not op.is_collective]
    moved = [(op.begin_s, op.end_s) for op in ops if op.is_collective]
    step_s = max(op.end_s for op in ops)
    waits = _waits(ops, busy, step_s)
    largest = sorted(by_name.items(), key=lambda row: -row[1])[:_MOST_NAMES]
    return Explained(
        step_s,
        _length(_union(busy)),
        _length(_union(moved)),
        exposed(moved, busy),
        dict(sorted(waits.items(), key=lambda row: -row[1])),
        dict(largest),
    )


def _waits(ops: Sequence[Op], busy: list[_Interval], step_s: float) -> dict[str, float]:
    ended = sorted((op.end_s, op.kind) for op in ops)
    sums: dict[str, float] = {}
    free = 0.0
    for begin, end in [*_union(busy), (step_s, step_s)]:
        if begin > free:
            place = bisect.bisect_right(ended, (begin, "~")) - 1
            # An operation that ended long before, or before the gap, is not what it waited for.
            is_cause = place >= 0 and ended[place][0] > max(free, begin - _SLACK_S)
            kind = ended[place][1] if is_cause else "host"
            sums[kind] = sums.get(kind, 0.0) + begin - free
        free = max(free, end)
    return sums


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    merged: list[_Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return merged


def _length(disjoint: list[_Interval]) -> float:
    return sum(end - begin for begin, end in disjoint)


# -- reading
# ----------------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[Op]:
    """Returns the operations of a step in a trace, which may be compressed with gzip.

    If the trace has steps (`torch.profiler.profile.step`), of the last complete one.

    Raises:
        UsageError: the file is no trace, or has no operation.
    """
    events = _last_step([e for e in _events(path) if e.get("ph") == "X" and _is_usable(e)])
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    ops = _device_ops(events, on_device) if on_device else _host_ops(events)
    if not ops:
        raise UsageError(
            f"{path} has no operation of a device or of PyTorch: profile a training step."
        )
    return ops


def _events(path: Path) -> list[Any]:
    try:
        content = read_regular(path, _NBYTES + 1)
        if path.suffix == ".gz":
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_NBYTES + 1)
        if len(content) > _NBYTES:
            raise UsageError(f"{path} has more than {_NBYTES >> 30} GiB: profile fewer steps.")
        raw = json.loads(content)
    except (ValueError, RecursionError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UsageError(
            f"{path} is no Chrome trace ({str(error)[:100]}): export one again."
        ) from error
    events = raw.get("traceEvents") if isinstance(raw, dict) else raw
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UsageError(f"{path} is no Chrome trace: it has no list of traceEvents.")
    return events


def _is_usable(event: _Event) -> bool:
    """Whether an event has times, and texts and numbers where it has to."""
    ts, dur = event.get("ts"), event.get("dur")
    return (
        isinstance(ts, int | float)
        and isinstance(dur, int | float)
        and abs(ts) <= _MOST_US
        and 0 <= dur <= _MOST_US
        and isinstance(event.get("cat", ""), str)
        and isinstance(event.get("tid", 0), int | str)
    )


def _last_step(events: list[_Event]) -> list[_Event]:
    """Returns the events of the last of the profiler's steps; all if there are no steps."""
    steps = [
        event
        for event in events
        if event.get("cat") == "user_annotation"
        and str(event.get("name", "")).startswith("ProfilerStep#")
    ]
    if not steps:
        return events
    last = max(steps, key=lambda event: event["ts"])
    begun = [event for event in events if last["ts"] <= event["ts"] < _end(last)]
    launched = {_argument(event, "correlation") for event in begun if event.get("cat") in _LAUNCHES}
    return [
        *(event for event in begun if event.get("cat") not in _ON_DEVICE and event is not last),
        *(
            event
            for event in events
            if event.get("cat") in _ON_DEVICE and _argument(event, "correlation") in launched
        ),
    ]


def _device_ops(events: list[_Event], on_device: list[_Event]) -> list[Op]:
    launches = [event for event in events if event.get("cat") in _LAUNCHES]
    start = min(float(event["ts"]) for event in (*launches, *on_device))
    return [
        Op(
            str(event.get("name")),
            str(_argument(event, "stream")),
            _kind_of(event),
            (float(event["ts"]) - start) * _US,
            (_end(event) - start) * _US,
        )
        for event in on_device
    ]


def _kind_of(event: _Event) -> str:
    name = f"{event.get('name', '')} {_argument(event, 'Collective name') or ''}".lower()
    if "nccl" in name and (kind := _collective(name)):
        return kind
    is_memory = event.get("cat") in ("gpu_memcpy", "gpu_memset") or "shardgrad" in name
    return "copy" if is_memory else "compute"


def _collective(name: str) -> str | None:
    plain = name.lower().replace("_", "").replace("-", "")
    return next((kind for part, kind in _COLLECTIVES.items() if part in plain), None)


def _argument(event: _Event, name: str) -> int | float | str | None:
    """Returns an argument that is a number or a text; None for another, and where there is none."""
    arguments = event.get("args")
    found = arguments.get(name) if isinstance(arguments, dict) else None
    return found if isinstance(found, int | float | str) else None


def _host_ops(events: list[_Event]) -> list[Op]:
    """Cuts the busiest thread's time into intervals, each of the innermost operation."""
    threads: dict[Any, list[_Event]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads.setdefault(event.get("tid"), []).append(event)
    if not threads:
        return []
    own = max(threads.values(), key=lambda group: sum(float(event["dur"]) for event in group))
    own.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    ops: list[Op] = []
    open_events: list[_Event] = []
    start = now = float(own[0]["ts"])

    def advance(until: float) -> None:
        nonlocal now
        if until > now:
            name = str(open_events[-1].get("name")) if open_events else "Python"
            kind = _host_kind(open_events)
            ops.append(Op(name, "host", kind, (now - start) * _US, (until - start) * _US))
            now = until

    for event in own:
        while open_events and _end(open_events[-1]) <= float(event["ts"]):
            advance(_end(open_events[-1]))
            open_events.pop()
        advance(float(event["ts"]))
        open_events.append(event)
    while open_events:
        advance(_end(open_events[-1]))
        open_events.pop()
    return ops


def _host_kind(open_events: list[_Event]) -> str:
    for event in reversed(open_events):
        name = str(event.get("name"))
        for prefix, kind in _ENGINE_SPANS.items():
            if name.startswith(prefix):
                return kind
        if name.startswith(("c10d::", "gloo:", "nccl:")):
            return _collective(name) or "exchange"
        if name.startswith("shardgrad::"):
            return "copy"
    return "compute"


def _end(event: _Event) -> float:
    return float(event["ts"]) + float(event["dur"])
