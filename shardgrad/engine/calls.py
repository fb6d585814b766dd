"""Calls that are not a unit's forward, but read its parameters: methods, inner modules, and modules
that use another one's weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardgrad.engine.param_group import ParamState
from shardgrad.engine.unit import Unit

__all__ = ["forward_around", "like_forward"]

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside of backward


def forward_around(module: nn.Module, unit: Unit, reader: nn.Module | None = None) -> None:
    """Makes a call of `reader` around the forward of the unit that owns the parameters of `module`,
    as by a method of the model, gather and reshard as that forward does.

    `reader` is `module` by default, or one that reads its parameters without calling it.
    """
    is_other = reader is not None
    reader = module if reader is None else reader
    # Whether each call that runs around the unit's forward has gathered, the innermost last. One
    # that raises leaves its entry: `after` does not come.
    calls: list[bool] = []
    is_hooked = False
    is_inside = False  # the latest call that backward may run again, of the unit's forward

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        nonlocal is_hooked, is_inside
        if unit.running or torch.compiler.is_compiling():
            is_inside = True
            return None
        owner = unit.group_owning.get(module)
        if owner is None:
            return None
        is_cut_short = False
        if _graph_task() != -1:
            # What runs again does what it did at first: of a call inside of the unit's forward,
            # whose inputs are the program's, nothing is cast.
            if is_inside and unit.context is not None:
                unit.unshard(unit.context.comm_ctx)
                unit.wait_for_unshard(unit.context.comm_ctx)
                return None
        else:
            # One without gradients, as of a metric between forward and backward, is not run again.
            is_inside = is_inside and not torch.is_grad_enabled()
            owner.reshard_if_stale()
            # Of a backward that was cut short, the unit's forward clears what is left.
            is_cut_short = unit.context is not None and unit.context.scheduler.backward_running
        gathers = is_cut_short or owner.state is not ParamState.UNSHARDED
        if gathers:  # no other call runs, or it would have gathered
            calls.clear()
        calls.append(gathers)
        if not is_hooked:  # now, since a call inside of the unit's forward needs no such hook
            reader.register_forward_hook(after, prepend=is_other)
            is_hooked = True
        if not gathers:
            return unit.cast_inputs(args, kwargs)
        try:
            return unit.pre_forward(unit.modules[0], args, kwargs)
        finally:
            # Nothing may be left open if this or the call raises.
            unit.running.clear()
            unit.is_called_around = True
            if unit.context is not None and unit.context.forward_root is unit:
                unit.context.forward_root = None

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if unit.running or not calls or (is_inside and _graph_task() != -1):
            return None
        if calls.pop():
            unit.is_called_around = False
            if unit.context is not None and unit.context.forward_root is None:
                unit.context.forward_root = unit
            return unit.post_forward(unit.modules[0], args, output)
        unit.watch_call(output)  # whose parameters may be resharded by the backward of another call
        return None

    # Before hooks of the program, but inside of those of the reader's own unit, if it has one.
    reader.register_forward_pre_hook(before, prepend=not is_other, with_kwargs=True)


def like_forward(unit: Unit, module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs a module's bound method between `pre_forward` and
    `post_forward`.

    The method may call forward as often as it likes.
    """

    @functools.wraps(method)
    def forward_method(*args: Any, **kwargs: Any) -> Any:
        running = len(unit.running)
        try:
            args, kwargs = unit.pre_forward(module, args, kwargs)
            return unit.post_forward(module, args, method(*args, **kwargs))
        except BaseException:
            unit.forward_failed(running)
            raise

    return forward_method
