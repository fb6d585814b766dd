"""What a step does between the pieces of its graph, because no graph can hold it.

Whoever records or watches a step takes such calls over, with `taken_over`; otherwise they are made at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

__all__ = ["outside", "taken_over"]

_P = ParamSpec("_P")
Taker = Callable[[Callable[[], Any]], None]

_now = threading.local()


def outside(call: Callable[_P, Any], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Calls what no graph can hold from inside a step: a print, a host read for a log, a write to a file.

    A `graphed_step` cuts its graph here. Every replay launches the first piece, makes the call with the same
    arguments, and launches the next piece. Tensors among the arguments have the values of that replay. In an
    eager step the call is made at once.

    Args:
        call: what it returns is dropped, since the step's Python does not run in a replay. Results have to be
            written into tensors.
        args: for the call. Tensors come detached, so that the graph does not keep what backward needs of
            them; a tensor that `call` closes over does.
        kwargs: for the call.

    Streams: the call is made with the step's stream current, behind the work before it. The host waits only
        if the call does.
    Capture: safe inside of a `graphed_step`, on the thread that called it, not inside a backward. Elsewhere
        the call is made at once, inside the capture.
    """
    given, named = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    taker: Taker | None = getattr(_now, "taker", None)
    if taker is None:
        call(*given, **named)
    else:
        taker(lambda: call(*given, **named))


@contextmanager
def taken_over(optimizers: Sequence[Optimizer], taker: Taker) -> Iterator[None]:
    """Gives `taker` every call of `outside` in this thread, and every step of the optimizers."""
    before, _now.taker = getattr(_now, "taker", None), taker
    try:
        with ExitStack() as patches:
            for optimizer in optimizers:
                patches.enter_context(_step_given(optimizer, taker))
            yield
    finally:
        _now.taker = before


@contextmanager
def _step_given(optimizer: Optimizer, taker: Taker) -> Iterator[None]:
    step = optimizer.step
    patched = "step" in vars(optimizer)  # a schedule has wrapped it

    def given(*args: Any, **kwargs: Any) -> None:
        taker(lambda: step(*args, **kwargs))

    optimizer.step = given  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        if patched:
            optimizer.step = step  # type: ignore[method-assign]
        else:
            del optimizer.step
