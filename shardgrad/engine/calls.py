"""Calls outside a unit's forward that read its parameters.

These are calls of methods, of inner modules, and of modules that use another module's weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardgrad.engine.param_group import UNSHARDED, graph_task
from shardgrad.engine.unit import Arguments, Unit


def forward_around(module: nn.Module, unit: Unit, reader: nn.Module | None = None) -> None:
    """Makes a call of `reader` outside the forward of its unit unshard and reshard as forward does.

    The unit owns the parameters of `module`. Such a call comes, for example, from a method of the
    model.

    Args:
        module: the module.
        unit: the unit.
        reader: a module that reads the parameters of `module` without calling it; by default
            `module`.
    """
    is_other = reader is not None
    reader = module if reader is None else reader
    # For each call outside the unit's forward, whether it has unsharded, the copies of the call
    # around it, and its own; the innermost last. A call that raises leaves its entry, because
    # `after` does not run.
    calls: list[tuple[bool, list[Any], list[Any]]] = []
    is_hooked = False
    # The dtypes of the inputs of those calls that backward may repeat.
    repeated: set[tuple[torch.dtype, ...]] = set()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        nonlocal is_hooked
        if torch.compiler.is_compiling() or module not in unit.group_owning:
            return None
        context, owner = unit.context, unit.group_owning[module]
        is_inside = bool(unit.running)
        if is_inside and owner.state is UNSHARDED:
            return None
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        dtypes = tuple(each.dtype for each in given)
        if context is not None and (is_inside or graph_task() != -1):
            # A recomputation casts what the call has cast. A call inside the unit's forward has
            # cast nothing; the unit has cast its inputs before. It arrives here if it is recomputed
            # or if the program has resharded in forward, for example by `state_dict()`.
            unit.unshard(context.comm_ctx)
            unit.wait_for_unshard(context.comm_ctx)
            return unit.cast_inputs(args, kwargs) if dtypes in repeated and not is_inside else None
        # Backward may repeat this call: grad is enabled, or an input requires grad, as in reentrant
        # checkpointing, which disables grad.
        if torch.is_grad_enabled() or any(each.requires_grad for each in given):
            repeated.add(dtypes)
        owner.reshard_if_stale()
        # The unit's forward has to clear a backward that was cut short.
        is_cut_short = context is not None and context.backward_running
        gathers = is_cut_short or owner.state is not UNSHARDED
        if not is_hooked:  # only now, since a call inside the unit's forward needs no hook
            reader.register_forward_hook(after, prepend=is_other)
            is_hooked = True
        outer, unit.copies = unit.copies, []
        try:
            if not gathers:
                return unit.cast_inputs(args, kwargs)
            return unit.pre_forward(unit.modules[0], args, kwargs)
        finally:
            calls.append((gathers, outer, unit.copies))
            if gathers:
                # Leave nothing open in case this or the call raises.
                unit.running.clear()
                unit.is_called_around = True
                if unit.context is not None and unit.context.forward_root is unit:
                    unit.context.forward_root = None

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if unit.running:
            return None
        if not calls or graph_task() != -1:
            unit.return_copies()
            return None
        gathered, outer, unit.copies = calls.pop()
        if gathered:
            unit.is_called_around = False
            if unit.context is not None and unit.context.forward_root is None:
                unit.context.forward_root = unit
            output = unit.post_forward(unit.modules[0], args, output)
        else:
            unit.watch_call(output)  # another call's backward may reshard the parameters
            unit.return_copies()
        unit.copies = outer
        return output

    # Runs before the program's hooks, but inside those of the reader's own unit, if it has one.
    reader.register_forward_pre_hook(before, prepend=not is_other, with_kwargs=True)


def like_forward(unit: Unit, module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs a bound method between `pre_forward` and `post_forward`.

    The method may call forward any number of times.
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
