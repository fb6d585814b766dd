"""Energy counters, where the hardware has some and lets us read them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RAPL = Path("/sys/class/powercap")


@dataclass(frozen=True)
class EnergyMeter:
    """Counts what the devices, or the packages of the machine, have used.

    Attributes:
        words: of what, by which means.
        joules: since some moment in the past.
    """

    words: str
    joules: Callable[[], float]


def find_meter(device: str) -> EnergyMeter | None:
    """The counter for `cpu` or `cuda`; None where there is none, or none that we may read."""
    try:
        meter = _nvml() if device == "cuda" else _rapl()
        meter.joules()
    except Exception:  # libraries, drivers and permissions each fail in their own way
        return None
    return meter


def _rapl() -> EnergyMeter:
    """The packages of an x86 machine; their counters start again from zero once in hours."""
    counters = sorted(_RAPL.glob("intel-rapl:[0-9]*/energy_uj"))
    if not counters:
        raise OSError("no RAPL counters")
    return EnergyMeter(
        "packages of the machine, by RAPL",
        lambda: sum(int(path.read_text(encoding="ascii")) for path in counters) / 1e6,
    )


def _nvml() -> EnergyMeter:
    """All GPUs of the machine, by NVML through `pynvml`, which is optional."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return EnergyMeter(
        "all GPUs of the machine, by NVML",
        lambda: float(sum(map(nvml.nvmlDeviceGetTotalEnergyConsumption, handles))) / 1e3,
    )
