"""Backwards that the program finalizes itself, as pipeline stages of torch 2.15 do.

In this mode no backward is the last one, whatever `set_is_last_backward` says: `finalize` reduces
the waiting gradients.
"""

from __future__ import annotations

from typing import NoReturn
from weakref import WeakKeyDictionary

from shardgrad.engine.lazy_init import lazy_init
from shardgrad.engine.unit import RootContext, Unit
from shardgrad.errors import BackwardFinalizationError, RootError
from shardgrad.policies import GradientReductionHandle

# For each root in this mode, the last value of `set_is_last_backward`, which applies again
# afterwards.
_manual: WeakKeyDictionary[RootContext, bool] = WeakKeyDictionary()


# The base depends on the installed torch.
class _Handle(GradientReductionHandle):
    """A handle for reductions in flight; until its `wait`, the root refuses to run forward."""

    def __init__(self, context: RootContext | None = None) -> None:
        self._context = context
        if context is not None:
            self._before_outermost_forward = context.root.before_outermost_forward
            context.root.before_outermost_forward = _refuse_forward

    def wait(self) -> None:
        """Makes the current stream wait for the gradients. Further calls do nothing."""
        context, self._context = self._context, None
        if context is not None:
            context.root.before_outermost_forward = self._before_outermost_forward
            context.join()


def _refuse_forward() -> NoReturn:
    raise BackwardFinalizationError(
        "The previous gradient reduction must be waited on before forward",
        expected="wait() on the handle that finalize_backward(async_op=True) returned",
        got="a forward with grad enabled",
        fix="handle = model.finalize_backward(async_op=True); ...; handle.wait()",
    )


def require_root(unit: Unit, context: RootContext, name: str) -> None:
    """Refuses to call a method of the root on another unit.

    Raises:
        RootError: naming the root.
    """
    if not unit.is_root:
        raise RootError(
            f"{name} must be called on the root FSDP module",
            expected=f"the root, {type(context.root.modules[0]).__name__}",
            got=f"unit {unit.name!r}",
            fix=f"root.{name}(...)",
        )


def set_is_last_backward(unit: Unit, is_last_backward: bool) -> None:
    """Sets the flag, or stores it for later while the program finalizes backwards itself."""
    context = lazy_init(unit)
    if context in _manual:
        _manual[context] = is_last_backward
    else:
        context.is_last_backward = is_last_backward


def set_manual(unit: Unit, enabled: bool) -> None:
    """Turns the mode on or off.

    Raises:
        RootError: not the root.
        BackwardFinalizationError: a backward is running, or has left unreduced gradients.
    """
    context = lazy_init(unit)
    require_root(unit, context, "set_manual_backward_finalization")
    if bool(enabled) == (context in _manual):
        return
    waiting = [grads.group.name for grads in context.grad_groups if grads.is_due]
    if context.backward_running or waiting:
        raise BackwardFinalizationError(
            "set_manual_backward_finalization cannot change mode after backward starts",
            expected="a call before the first backward, or after finalize_backward()",
            got=f"unreduced gradients of {', '.join(waiting)}" if waiting else "a running backward",
            fix="model.finalize_backward() first" if not enabled else "call it before forward",
        )
    if enabled:
        _manual[context] = context.is_last_backward
        context.is_last_backward = False
    else:
        context.is_last_backward = _manual.pop(context)


def finalize(unit: Unit, *, async_op: bool) -> GradientReductionHandle | None:
    """Reduces the waiting gradients, and reshards, by the current settings. A collective.

    Returns:
        With `async_op`, a handle to wait for the gradients. Otherwise they have been waited for.

    Raises:
        RootError: not the root.
        BackwardFinalizationError: this mode is off, a backward is running, or an earlier call was
            not waited for.
    """
    context = unit.context
    if context is None:  # no forward has run
        return _Handle() if async_op else None
    require_root(unit, context, "finalize_backward")
    if context.root.before_outermost_forward is _refuse_forward:
        raise BackwardFinalizationError(
            "The previous gradient reduction must be waited on before finalizing backward again",
            expected="wait() on the handle that finalize_backward(async_op=True) returned",
            fix="handle.wait()",
        )
    if context not in _manual or context.backward_running:
        raise BackwardFinalizationError(
            "finalize_backward requires manual backward finalization, after backward has finished",
            expected="set_manual_backward_finalization(True) before forward",
            got="a running backward" if context in _manual else "automatic finalization",
            fix="model.set_manual_backward_finalization(True)",
        )
    context.is_last_backward = True
    try:
        end_backward(context, wait=not async_op)
    finally:
        context.is_last_backward = False
    return _Handle(context) if async_op else None


def end_backward(context: RootContext, *, wait: bool = True) -> None:
    """Ends a backward of several micro-batches outside autograd: reduces the gradients
    they left.
    """
    context.begin_backward(in_autograd=False)
    context.end_backward(wait=wait)
