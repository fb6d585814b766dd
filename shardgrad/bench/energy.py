"""Energy counters, where the hardware has some and lets us read them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

__all__ = ["EnergyMeter"]

_RAPL = Path("/sys/class/powercap")


class EnergyMeter(ABC):
    """Counts what the devices, or the packages of the machine, have used.

    Attributes:
        words: of what, by which means.
    """

    words: str

    @abstractmethod
    def joules(self) -> float:
        """Since some moment in the past."""

    @staticmethod
    def find(device: str) -> EnergyMeter | None:
        """The counter for `cpu` or `cuda`; None where there is none, or none that we may read."""
        meter: EnergyMeter
        try:
            meter = _Nvml() if device == "cuda" else _Rapl()
            meter.joules()
        except Exception:  # libraries, drivers and permissions each fail in their own way
            return None
        return meter


class _Rapl(EnergyMeter):
    """The packages of an x86 machine; their counters start again from zero once in hours."""

    words = "packages of the machine, by RAPL"

    def __init__(self) -> None:
        self._counters = sorted(_RAPL.glob("intel-rapl:[0-9]*/energy_uj"))
        if not self._counters:
            raise OSError("no RAPL counters")

    def joules(self) -> float:
        return sum(int(path.read_text(encoding="ascii")) for path in self._counters) / 1e6


class _Nvml(EnergyMeter):
    """All GPUs of the machine, by NVML through `pynvml`, which is optional."""

    words = "all GPUs of the machine, by NVML"

    def __init__(self) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        count = self._nvml.nvmlDeviceGetCount()
        self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def joules(self) -> float:
        return float(sum(map(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handles))) / 1e3
