"""What torch's tools that trace a program see of the engine: names in profiles, and nothing in the
graphs of `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.autograd import profiler

__all__ = ["NOTHING", "outside_graphs", "span"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

NOTHING: AbstractContextManager[None] = nullcontext()  # a context that changes nothing


def span(what: str, unit: str) -> AbstractContextManager[object]:
    """Returns a context that shows up as `FSDP::what (unit)` in a profile, if one is made."""
    if not profiler._is_profiler_enabled:
        return NOTHING
    return torch.profiler.record_function(f"FSDP::{what} ({unit})")


def outside_graphs(function: _Function) -> _Function:
    """Makes `torch.compile` break its graph at a function and run it, and what it calls, as plain
    Python.

    It belongs on all that torch or a program calls in a step: Dynamo cannot trace the engine.
    `torch.compiler.disable` does the same, but imports Dynamo (over a second and some 100 MB) and
    costs each hook more than its own decisions. Under `torch.no_grad`, not over it: what that
    returns shares its code with all such functions.
    """
    attributes: Any = function
    attributes._torchdynamo_disable = True  # for a graph that would inline it
    # And where Dynamo watches the thread, as it does during a backward in a compiled function.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(attributes.__code__, skip)
    return function
