"""Names in profiler traces, the ones FSDP users already search for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.autograd.profiler as _profiler

__all__ = ["span"]

_NOTHING: AbstractContextManager[None] = nullcontext()


def span(what: str, unit: str) -> AbstractContextManager[object]:
    """Returns a context that shows up as `FSDP::what (unit)` in a profile, and costs ~0.1 us otherwise."""
    if not _profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"FSDP::{what} ({unit})")
