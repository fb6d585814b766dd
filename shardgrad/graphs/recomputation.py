"""Regions that backward computes again (`torch.utils.checkpoint`), while a graph is recorded.

By default a region saves the state of random numbers, to draw the same ones again. That state cannot be read
during a capture. A region that draws none does not need it. One that draws is refused: it would draw others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardgrad.engine.streams import is_capturing
from shardgrad.errors import CaptureError

__all__ = ["draws_again", "recorded_without_random_state"]


def draws_again(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operation draws random numbers that have to be those of an earlier forward.

    To be asked while the operation runs, in the thread in which it does.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    names = (argument.name for argument in func._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # Attention is tagged whether it drops anything or not.
    return given.get("dropout_p", given.get("p")) != 0 and _is_recomputing()


def _is_recomputing() -> bool:
    """Returns whether a region that preserves the state of random numbers is being computed again."""
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
def recorded_without_random_state() -> Iterator[None]:
    """Lets regions be captured that preserve the state of random numbers, as long as they draw none.

    Raises:
        CaptureError: inside the block, from a backward that draws.
    """
    _let_regions_save_nothing()
    with _Guard():
        yield


class _Guard(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled regions run compiled; under other modes torch skips them, and goes on to."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if draws_again(func, args, kwargs):
            raise CaptureError(
                f"a recomputed region draws random numbers ({func})",
                expected="no random numbers in regions of torch.utils.checkpoint, since a graph cannot save "
                "their state",
                got="numbers that would not be those of the forward",
                fix="move the dropout out of the region",
            )
        return func(*args, **kwargs)


@cache
def _let_regions_save_nothing() -> None:
    """Has regions save no state of a device that is captured. For good: threads may capture together."""
    get_device_states = checkpoint.get_device_states

    @functools.wraps(get_device_states)
    def states_if_readable(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
        devices = {
            t.device for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.device.type != "cpu"
        }
        if any(map(is_capturing, devices)):
            return [], []
        states: tuple[list[int], list[torch.Tensor]] = get_device_states(*args)
        return states

    checkpoint.get_device_states = states_if_readable
