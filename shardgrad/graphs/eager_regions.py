"""Eager regions: calls between the graphs of a split step, for work that no graph can hold.

While a step is captured, its eager calls go to a handler (`handle_eager_calls`); at any
other time they are made at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["handle_eager_calls", "outside"]

_P = ParamSpec("_P")
Handler = Callable[[Callable[[], Any]], None]


class _ThreadState(threading.local):
    """The handler of the calling thread."""

    handler: Handler | None = None


_thread = _ThreadState()


def outside(call: Callable[_P, Any], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Makes a call that no graph can hold inside a step: a print, a host read for a log, the step
    of an optimizer that counts on the host.

    A `graphed_step` splits its graph here. Every replay launches the graph before, makes the call
    with the same arguments, and launches the graph after. Tensors among the arguments have the
    values of that replay. In an eager step the call is made at once.

    For example, in the step:

        shardgrad.graphs.outside(lambda value: print("loss", value.item()), loss)
        shardgrad.graphs.outside(optimizer.step)  # and graphed_step(model), without the optimizer

    Args:
        call: the function. What it returns is dropped, since a replay does not run the step's
            Python; write results into tensors.
        args: for the call. Tensors are detached, so that the graph does not keep what backward
            needs of them; a tensor that `call` closes over is not.
        kwargs: for the call.

    Streams: the call is made with the step's stream current, after the work before it. The host
    waits only
        if the call does.
    Capture: safe inside a `graphed_step`, on the thread that called it, and not inside a backward.
    Elsewhere
        the call is made at once, inside the capture.
    """
    given, named = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    handler = _thread.handler
    if handler is None:
        call(*given, **named)
    else:
        handler(lambda: call(*given, **named))


@contextmanager
def handle_eager_calls(handler: Handler) -> Iterator[None]:
    """Passes to `handler` every call of `outside` in this thread."""
    before, _thread.handler = _thread.handler, handler
    try:
        yield
    finally:
        _thread.handler = before
