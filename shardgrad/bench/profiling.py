"""Watching a step with torch's profiler, and counting the DTensors that Python constructs in one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from shardgrad.bench.trace_reading import STEP

__all__ = ["counting_dtensors", "trace"]


def trace(step: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Runs one step under the profiler and returns the events of its Chrome trace, with shapes.

    Where the profiler cannot start (some containers forbid it), the step is taken all the same, and there
    are no events.
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
    with tempfile.TemporaryDirectory(prefix="shardgrad-bench-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


@contextmanager
def counting_dtensors() -> Iterator[list[int]]:
    """Counts in the only element of the list it gives; wrappers that C++ makes do not count."""
    original = DTensor.__new__
    count = [0]

    def counting(*args: Any, **kwargs: Any) -> DTensor:
        count[0] += 1
        return original(*args, **kwargs)

    DTensor.__new__ = staticmethod(counting)  # type: ignore[method-assign]
    try:
        yield count
    finally:
        DTensor.__new__ = original  # type: ignore[method-assign]
