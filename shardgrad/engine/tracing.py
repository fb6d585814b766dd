"""What profilers and `torch.compile` see of the engine: named spans, and no traced code."""

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

_Function = TypeVar("_Function", bound=Callable[..., Any])

NOTHING: AbstractContextManager[None] = nullcontext()  # a no-op context


def span(what: str, unit: str) -> AbstractContextManager[object]:
    """Returns a context that appears as `FSDP::what (unit)` in a profile that is being recorded."""
    if not profiler._is_profiler_enabled:
        return NOTHING
    return torch.profiler.record_function(f"FSDP::{what} ({unit})")


def outside_graphs(function: _Function) -> _Function:
    """Makes `torch.compile` break its graph at a function, and run it and its callees in Python.

    Every function that torch or a program calls in a step needs it: Dynamo cannot trace the engine.
    `torch.compiler.disable` does the same, but imports Dynamo (over a second and some 100 MB) and
    costs each hook more time than the hook's own work. Apply it under `torch.no_grad`, not over it:
    all functions that `no_grad` returns share one code object.
    """
    attributes: Any = function
    attributes._torchdynamo_disable = True  # if another graph would inline it
    # Also needed where Dynamo watches the thread, as in the backward of a compiled function.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(attributes.__code__, skip)
    return function
