"""Whether a contestant can fit at all, by arithmetic, before it takes the machine's last byte."""

from __future__ import annotations

from pathlib import Path

from shardgrad.bench.catalogue import CATALOGUE
from shardgrad.bench.shapes import SHAPES, numel_of
from shardgrad.bench.task import Task

__all__ = ["lack_of_memory", "least_nbytes"]

_STATE_NBYTES = 16  # of a parameter: weight, gradient and two moments, in fp32
_WHOLE_NBYTES = 4  # of a parameter that is there in full: the weight


def least_nbytes(name: str, task: Task) -> int | None:
    """Bytes that all ranks of a contestant need at the least, without activations; None if not known."""
    if task.hf is not None:
        return None
    numel, entry = numel_of(SHAPES[task.preset]), CATALOGUE[name]
    if entry.is_alone:
        return numel * _STATE_NBYTES
    replicas = task.ranks // task.mesh_shape[-1]
    if entry.shards:
        return numel * _STATE_NBYTES * replicas
    # Whole weights and gradients everywhere; what the optimizer keeps may be shared.
    return numel * (2 * _WHOLE_NBYTES * task.ranks + (_STATE_NBYTES - 2 * _WHOLE_NBYTES))


def lack_of_memory(name: str, task: Task) -> str | None:
    """Why the host's memory cannot hold a contestant, in words; None where it may, or on a GPU.

    A GPU refuses an allocation and its crew tells; a host ends whatever process it likes.
    """
    needed = least_nbytes(name, task)
    available = _available_nbytes()
    if task.device != "cpu" or needed is None or available is None or needed <= available:
        return None
    return f"out of memory: it needs at least {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"


def _available_nbytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
