"""Keeping the engine's hooks out of graphs that `torch.compile` builds around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)

__all__ = ["outside_graphs"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
    # And where a compiled module runs it as a frame of its own: what it calls decides for itself.
    code = call.__code__  # type: ignore[attr-defined]
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return call
