"""What torch's profiler and `torch.compile` need of the engine: names in traces, hooks kept out of graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
import torch.autograd.profiler as _profiler
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)

__all__ = ["outside_graphs", "span"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NOTHING: AbstractContextManager[None] = nullcontext()


def span(what: str, unit: str) -> AbstractContextManager[object]:
    """Returns a context that shows up as `FSDP::what (unit)` in a profile, and costs ~0.1 us otherwise."""
    if not _profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"FSDP::{what} ({unit})")


def outside_graphs(hook: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes `torch.compile` break its graph at `hook` and run it, and what it calls, as plain Python.

    `torch.compiler.disable` would do, but importing Dynamo costs a program that compiles nothing over a
    second and some 100 MB, and going through it costs each hook more than the hook's own decisions. So it is
    only asked for where Dynamo is watching the calling thread.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(hook)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if get_eval_frame_callback() is None:
            return hook(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(hook, recursive=True)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # for a graph that would inline it
    # And where a compiled module runs it as a separate frame: what it calls decides for itself.
    code = call.__code__  # type: ignore[attr-defined]
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return call
