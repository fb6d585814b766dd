"""Regions that backward recomputes (`torch.utils.checkpoint`), inside a capture.

By default a region saves the state of random numbers in forward, to draw the same ones when it is
recomputed. That state cannot be read during a capture. A region that draws no random numbers does
not need it, so nothing is saved then; a region that draws when it is recomputed is refused, because
it would draw other numbers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from shardgrad.engine.streams import is_capturing
from shardgrad.errors import CaptureError
from shardgrad.graphs.torch_patches import Patch, Replacement

__all__ = ["captured_recomputation", "refuse_redraw"]


def refuse_redraw(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses an operation that draws random numbers which have to be those of an earlier forward.

    Called before the operation, in the thread that runs it.

    Raises:
        CaptureError: it does.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # Attention has the tag whether or not it drops anything.
    if given.get("dropout_p", given.get("p")) != 0 and _is_recomputing():
        raise CaptureError(
            f"a recomputed region draws random numbers ({func})",
            expected="no random numbers in regions of torch.utils.checkpoint, since a graph cannot "
            "save their state",
            got="numbers that would not be those of the forward",
            fix="move the dropout out of the region",
        )


def _is_recomputing() -> bool:
    """Returns whether a region that preserves the state of random numbers is being recomputed."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            if frame.f_code.co_name == "recompute_fn" and frame.f_locals.get("preserve_rng_state"):
                return True
            if frame.f_code is checkpoint.CheckpointFunction.backward.__code__:
                return bool(frame.f_locals["ctx"].preserve_rng_state)
        frame = frame.f_back
    return False


@contextmanager
def captured_recomputation() -> Iterator[None]:
    """Lets regions that preserve the state of random numbers be captured: none is saved."""

    def replacements() -> Iterator[Replacement]:
        yield checkpoint, "get_device_states", _without_captured_devices

    with _patch.active(replacements):
        yield


_patch = Patch()


def _without_captured_devices(get_device_states: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's function, which saves no state where the calling thread is capturing."""

    @functools.wraps(get_device_states)
    def readable_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
        devices = {
            t.device
            for t in tree_leaves(args)
            if isinstance(t, torch.Tensor) and t.device.type != "cpu"
        }
        if any(map(is_capturing, devices)):
            return [], []
        states: tuple[list[int], list[torch.Tensor]] = get_device_states(*args)
        return states

    return readable_device_states
