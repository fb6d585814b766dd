"""Profiles one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def profiled(folder: Path | None, device: torch.device) -> Iterator[None]:
    """Writes `trace.json` of the block into a folder; None profiles nothing.

    Waits for the device before and after, so that the trace has this step's work and no other's.
    """
    if folder is None:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(getattr(ProfilerActivity, device.type.upper()))
        torch.accelerator.synchronize(device)
    # Waits between streams are in the trace only if they are asked for.
    waits = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    with profile(activities=activities, experimental_config=waits) as profiler:
        yield
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    profiler.export_chrome_trace(str(folder / "trace.json"))
