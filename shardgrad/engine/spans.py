"""Names in profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

__all__ = ["NOTHING", "span"]

NOTHING: AbstractContextManager[None] = nullcontext()  # a context that changes nothing


def span(what: str, unit: str) -> AbstractContextManager[object]:
    """Returns a context that shows up as `FSDP::what (unit)` in a profile, if one is made."""
    if not profiler._is_profiler_enabled:
        return NOTHING
    return torch.profiler.record_function(f"FSDP::{what} ({unit})")
