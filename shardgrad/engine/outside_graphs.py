"""What `torch.compile` leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

__all__ = ["outside_graphs"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


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
