"""Names in profiles; callers test for a profiler first, since a unit's step has eight spans."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["NO_SPAN", "profiler", "span"]


class _NoSpan:
    """A context without effect. Its calls are to C, in half of `nullcontext`'s time."""

    __enter__: Any = type(None)
    __exit__: Any = "".format  # takes what went wrong, and is false: an exception goes on


NO_SPAN: AbstractContextManager[None] = _NoSpan()


def span(what: str, unit: str) -> AbstractContextManager[object]:
    """Returns a context that shows up as `FSDP::what (unit)` in a profile."""
    return torch.profiler.record_function(f"FSDP::{what} ({unit})")
