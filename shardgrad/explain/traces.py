"""Chrome traces, as `torch.profiler` exports them: read as a step, and written from one for
Perfetto.

[Note: What a trace says about waits]
Operations of a device have a stream and a correlation with their launch on the host. Waits between
streams are there only if the profiler was asked for them (`enable_cuda_sync_events`), as `shardgrad
train --profile` and `shardgrad plan --trace` do. Where there are none, they are inferred: an
operation that was launched before, on a lane that was free, waited for the operation of another
lane that ended last before it began.

A trace of a CPU has no device: the thread with most operations is the step, cut into intervals by
the innermost operation, and by the engine's spans around it.
"""

from __future__ import annotations

import bisect
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardgrad.explain.replay import Replay
from shardgrad.explain.step import COLLECTIVES, Kind, Op, Step
from shardgrad.train.config import read_regular
from shardgrad.train.failure import UsageError

__all__ = ["read_trace", "trace_of", "write_trace"]

_NBYTES = 2 * 2**30  # of a trace, uncompressed
_US = 1e-6
_MOST_US = 1e15  # thirty years, in which sums and quotients of times stay finite
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_DTYPES = {"Float": "fp32", "float32": "fp32", "fp32": "fp32", "BFloat16": "bf16", "bf16": "bf16"}
_NAMES: tuple[tuple[str, Kind], ...] = (
    ("allgather", "all-gather"),
    ("all_gather", "all-gather"),
    ("all-gather", "all-gather"),
    ("reducescatter", "reduce-scatter"),
    ("reduce_scatter", "reduce-scatter"),
    ("reduce-scatter", "reduce-scatter"),
    ("allreduce", "all-reduce"),
    ("all_reduce", "all-reduce"),
    ("all-reduce", "all-reduce"),
    ("sendrecv", "exchange"),
    ("alltoall", "exchange"),
    ("exchange", "exchange"),
)
_ENGINE_SPANS: tuple[tuple[str, Kind], ...] = (
    ("FSDP::all_gather_copy_out", "copy"),
    ("FSDP::all_gather", "all-gather"),
    ("FSDP::post_backward_reduce", "reduce-scatter"),
    ("FSDP::root_post_backward", "reduce-scatter"),
)
_SLACK_S = 20e-6  # between the end of what was waited for and the begin of what waited

_Event = Mapping[str, Any]


def read_trace(path: Path) -> Step:
    """Reads a step from a trace, which may be compressed with gzip.

    If the trace has steps (`torch.profiler.profile.step`), the last complete one.

    Raises:
        UsageError: the file is no trace, or has no operation.
    """
    events = [event for event in _events(path) if event.get("ph") == "X" and _is_usable(event)]
    events, note = _last_step(events)
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    step = _device_step(events, on_device) if on_device else _host_step(events)
    if not step.ops:
        raise UsageError(
            f"{path} has no operation of a device or of PyTorch: profile a training step."
        )
    return Step(step.ops, step.seconds, "; ".join(filter(None, (note, step.note))))


def write_trace(step: Step, played: Replay, path: Path) -> None:
    """Writes a replayed step as a Chrome trace, which Perfetto shows and `read_trace` reads.

    The file is compressed if its name ends in `.gz`.
    """
    content = json.dumps({"traceEvents": trace_of(step, played)}).encode()
    try:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): correct the path."
        ) from error


def trace_of(step: Step, played: Replay) -> list[dict[str, Any]]:
    """Returns the events of a Chrome trace: operations, their launches, and waits between
    streams.
    """
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(op.lane for op in step.ops))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "host"}})
    host_s = 0.0
    for number, op in enumerate(step.ops):
        begin, launch_begin = played.begins[number] / _US, host_s
        host_s = max([host_s, *(played.ends[other] for other in op.host_after)]) + op.launch_s
        stream = lanes[op.lane]
        arguments = {"stream": stream, "correlation": number, "kind": op.kind, "dtype": op.dtype}
        if op.link:
            arguments["link"] = op.link
        events += [
            _complete(
                "cudaLaunchKernel", "cuda_runtime", 1, 0, launch_begin / _US, op.launch_s / _US
            )
            | {"args": {"correlation": number, "host_after": list(op.host_after)}},
            _complete(op.name, "kernel", 0, stream, begin, op.seconds / _US) | {"args": arguments},
        ]
        events += [
            _complete("Stream Wait Event", "cuda_sync", 0, stream, begin, 0.0)
            | {"args": {"stream": stream, "correlation": number, "waits_for": other}}
            for other in op.after
        ]
    return events


def _complete(
    name: str, category: str, pid: int, tid: int, begin: float, length: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": length,
    }


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


def _last_step(events: list[_Event]) -> tuple[list[_Event], str]:
    """Returns the events that begin in the last of the profiler's steps; all if there are no
    steps.
    """
    steps = [event for event in events if str(event.get("name", "")).startswith("ProfilerStep#")]
    steps = [event for event in steps if event.get("cat") == "user_annotation"]
    if not steps:
        return events, ""
    last = max(steps, key=lambda event: event["ts"])
    begin, end = last["ts"], last["ts"] + last["dur"]
    launched = {
        _argument(event, "correlation")
        for event in events
        if event.get("cat") in _LAUNCHES and begin <= event["ts"] < end
    } - {None}
    kept = [
        event
        for event in events
        if (
            _argument(event, "correlation") in launched
            if event.get("cat") in _ON_DEVICE | {"cuda_sync"}
            else begin <= event["ts"] < end and event is not last
        )
    ]
    return kept, str(last["name"])


# -- a device


def _device_step(events: list[_Event], on_device: list[_Event]) -> Step:
    launches = {
        _argument(event, "correlation"): event
        for event in events
        if event.get("cat") in _LAUNCHES and _argument(event, "correlation") is not None
    }

    def launched_at(event: _Event) -> float:
        launch = launches.get(_argument(event, "correlation"))
        return float(event["ts"] if launch is None else launch["ts"] + launch["dur"])

    ordered = sorted(on_device, key=lambda event: (launched_at(event), event["ts"]))
    position = {_argument(event, "correlation"): number for number, event in enumerate(ordered)}
    waits = _waits(events, ordered, position, launched_at)
    inferred = not waits
    if inferred:
        waits = _inferred_waits(ordered, launched_at)
    host_waits = [event for event in events if str(event.get("name")) in _HOST_WAITS]
    ops: list[Op] = []
    before = min(
        (float(event["ts"]) for event in launches.values()), default=launched_at(ordered[0])
    )
    for number, event in enumerate(ordered):
        launched = launched_at(event)
        stalls = [each for each in host_waits if before <= each["ts"] and _end(each) <= launched]
        stalled = sum(float(wait["dur"]) for wait in stalls)
        launch = launches.get(_argument(event, "correlation"))
        host_after = () if launch is None else _waited_by_host(launch, position, number)
        if stalls:  # the host waited for what it had launched
            host_after = tuple(range(max(0, number - 1), number))
        kind = _kind_of(event)
        ops.append(
            Op(
                name=str(event.get("name")),
                lane=str(_argument(event, "stream")),
                kind=kind,
                seconds=float(event["dur"]) * _US,
                launch_s=max(0.0, launched - before - stalled) * _US,
                after=tuple(sorted(waits.get(number, ()))),
                host_after=host_after,
                link=str(_argument(event, "link") or "collectives")
                if kind in COLLECTIVES
                else None,
                dtype=_DTYPES.get(str(_argument(event, "dtype")), ""),
            )
        )
        before = max(before, launched)
    begin = min(float(event["ts"]) for event in (*launches.values(), *ordered))
    end = max(float(event["ts"]) + float(event["dur"]) for event in ordered)
    note = "waits between streams are inferred from times" if inferred else ""
    return Step(tuple(ops), (end - begin) * _US, note)


def _waits(
    events: Iterable[_Event], ordered: list[_Event], position: Mapping[Any, int], launched_at: Any
) -> dict[int, set[int]]:
    """Returns, for each position, those it waits for, from the profiler's events of
    synchronization.
    """
    syncs = [event for event in events if event.get("cat") == "cuda_sync"]
    found: dict[int, set[int]] = {}
    records = {
        _argument(event, "correlation"): float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "EventRecord" in str(event.get("name"))
    }
    by_lane: dict[Any, list[tuple[float, int]]] = {}
    for number, event in enumerate(ordered):
        by_lane.setdefault(_argument(event, "stream"), []).append((launched_at(event), number))
    host_times = {
        _argument(event, "correlation"): float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES
    }
    for event in syncs:
        waits_for = _argument(event, "waits_for")
        if waits_for is not None:  # written by `trace_of`
            waiting, waited = (
                position.get(_argument(event, "correlation"), -1),
                position.get(waits_for, -1),
            )
            if 0 <= waited < waiting:
                found.setdefault(waiting, set()).add(waited)
            continue
        recorded = records.get(_argument(event, "wait_on_cuda_event_record_corr_id"))
        issued = host_times.get(_argument(event, "correlation"))
        if recorded is None or issued is None:
            continue
        other = by_lane.get(_argument(event, "wait_on_stream"), [])
        own = by_lane.get(_argument(event, "stream"), [])
        waited = bisect.bisect_right(other, (recorded, len(ordered))) - 1
        waiting = bisect.bisect_left(own, (issued, -1))
        if waited >= 0 and waiting < len(own) and other[waited][1] < own[waiting][1]:
            found.setdefault(own[waiting][1], set()).add(other[waited][1])
    return found


def _waited_by_host(launch: _Event, position: Mapping[Any, int], number: int) -> tuple[int, ...]:
    """Returns the positions, before `number`, that the host waited for; written by `trace_of`."""
    arguments = launch.get("args")
    named = arguments.get("host_after") if isinstance(arguments, dict) else None
    if not isinstance(named, list):
        return ()
    found = {position.get(other, number) for other in named if isinstance(other, int)}
    return tuple(sorted(other for other in found if other < number))


def _inferred_waits(ordered: list[_Event], launched_at: Any) -> dict[int, set[int]]:
    """Guesses waits from times; see [Note: What a trace says about waits]."""
    ends = sorted(
        (float(event["ts"]) + float(event["dur"]), number) for number, event in enumerate(ordered)
    )
    free: dict[Any, float] = {}
    found: dict[int, set[int]] = {}
    for number, event in enumerate(ordered):
        lane, begin = _argument(event, "stream"), float(event["ts"])
        ready = max(launched_at(event), free.get(lane, 0.0))
        if begin - ready > _SLACK_S / _US:
            place = bisect.bisect_right(ends, (begin, len(ordered))) - 1
            while place >= 0 and (
                ends[place][1] >= number or _argument(ordered[ends[place][1]], "stream") == lane
            ):
                place -= 1
            if place >= 0 and begin - ends[place][0] <= _SLACK_S / _US:
                found[number] = {ends[place][1]}
        free[lane] = begin + float(event["dur"])
    return found


def _kind_of(event: _Event) -> Kind:
    given = _argument(event, "kind")
    if given in ("compute", "copy", *COLLECTIVES):
        kind: Kind = given
        return kind
    name = f"{event.get('name', '')} {_argument(event, 'Collective name') or ''}".lower()
    for part, named in _NAMES:
        if part in name and "nccl" in name:
            return named
    is_memory = event.get("cat") in ("gpu_memcpy", "gpu_memset") or "shardgrad" in name
    return "copy" if is_memory else "compute"


def _argument(event: _Event, name: str) -> int | float | str | None:
    """Returns an argument that is a number or a text; None for another, and where there is none."""
    arguments = event.get("args")
    found = arguments.get(name) if isinstance(arguments, dict) else None
    return found if isinstance(found, int | float | str) else None


# -- a CPU


def _host_step(events: list[_Event]) -> Step:
    """Cuts the busiest thread's time into intervals, each of the innermost operation."""
    threads: dict[Any, list[_Event]] = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads.setdefault(event.get("tid"), []).append(event)
    if not threads:
        return Step(())
    own = max(threads.values(), key=lambda group: sum(float(event["dur"]) for event in group))
    own.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    ops: list[Op] = []
    open_events: list[_Event] = []
    now = float(own[0]["ts"])

    def advance(until: float) -> None:
        nonlocal now
        if until > now:
            kind = _host_kind(open_events)
            name = str(open_events[-1].get("name")) if open_events else "Python"
            ops.append(Op(name, "host", kind, (until - now) * _US))
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
    return Step(tuple(ops), sum(op.seconds for op in ops), "operations of one thread of a CPU")


def _host_kind(open_events: list[_Event]) -> Kind:
    for event in reversed(open_events):
        name = str(event.get("name"))
        for prefix, kind in _ENGINE_SPANS:
            if name.startswith(prefix):
                return kind
        if name.startswith(("c10d::", "gloo:", "nccl:")):
            for part, named in _NAMES:
                if part in name.lower():
                    return named
            return "exchange"
        if name.startswith("shardgrad::"):
            return "copy"
    return "compute"


def _end(event: _Event) -> float:
    return float(event["ts"]) + float(event["dur"])
