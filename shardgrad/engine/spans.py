"""Names in profiles; callers test for a profiler first, since a unit's step has eight spans."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

__all__ = ["NO_SPAN", "profiler", "span"]


NO_SPAN: AbstractContextManager[None] = nullcontext()


def span(what: str, unit: str) -> AbstractContextManager[object]:
    """Returns a context that shows up as `FSDP::what (unit)` in a profile."""
    return torch.profiler.record_function(f"FSDP::{what} ({unit})")
