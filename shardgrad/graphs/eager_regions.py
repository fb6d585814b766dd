"""Eager regions: calls between the graphs of a split step, for work that a graph cannot contain.

Inside a step, calls of `outside` go to a handler (`handle_eager_calls`). Elsewhere they run
immediately.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec

import torch
from torch.utils._pytree import tree_map_only

_P = ParamSpec("_P")
_handler: ContextVar[Any] = ContextVar("_handler", default=operator.call)  # one per thread


def outside(call: Callable[_P, Any], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Makes a call inside a step that a graph cannot contain: a print, a host read for a log, or
    the step of an optimizer that keeps its step count on the host.

    A `graphed_step` splits its graph here. Every replay launches the graph before the call, makes
    the call with the same arguments, and launches the graph after it. Tensors among the arguments
    have the values of that replay. In an eager step the call is made immediately.

    For example, in the step:

        shardgrad.graphs.outside(lambda value: print("loss", value.item()), loss)
        shardgrad.graphs.outside(optimizer.step)  # and graphed_step(model), without the optimizer

    Args:
        call: the function. Its result is dropped, since a replay does not run the step's Python;
            write results into tensors.
        args: positional arguments of the call. Tensors are detached, so that the graph does not
            keep their autograd graph alive. Tensors that `call` closes over are not detached.
        kwargs: keyword arguments of the call, likewise.

    Streams: the call runs with the step's stream current, after the work before it. The host waits
        only if the call does.
    Capture: safe inside a `graphed_step`, on the thread that called the step, and not inside a
        backward. Elsewhere the call runs immediately, inside the capture.
    """
    given, named = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    _handler.get()(partial(call, *given, **named))


def is_in_step() -> bool:
    """Returns whether this thread runs the function of a graphed step."""
    return _handler.get() is not operator.call


@contextmanager
def handle_eager_calls(handler: Callable[[Callable[[], Any]], None]) -> Iterator[None]:
    """Passes every call of `outside` in this thread to `handler` while the block runs."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)
