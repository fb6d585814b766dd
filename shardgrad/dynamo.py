"""Keeping the engine's hooks out of graphs that `torch.compile` builds around them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_graphs"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(hook: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes `torch.compile` break its graph at `hook` and run it, and what it calls, as plain Python.

    `torch.compiler.disable` would do, but importing Dynamo costs every program over a second and some 100
    MB; a program that has not imported it compiles nothing.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(hook)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return hook(*args, **kwargs)
            disabled = torch.compiler.disable(hook, recursive=True)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
