"""The package's hooks on optimizer steps. No other file registers any.

The engine has to know when an optimizer steps. Version counters do not show it: fused and foreach
optimizers write the local tensors of DTensors below the level at which autograd counts versions.
torch has hooks on one optimizer, whose instance the model does not know, and hooks on all
optimizers of the process. So the first sharded model registers a global hook before steps and one
after them. Both return immediately for an optimizer without parameters of a sharded model. They are
never removed: a model may be garbage collected during a step, while torch iterates over its hooks.

The hooks do the following:

* after a step, mark parameters that had gradients, and that a unit keeps unsharded, as stale
  (`FSDPParam.steps_taken`);
* before a step, refuse one of weights that sleep, and wait for all-gathers that a failed forward
  has left, since they read what the step writes, and for reductions that a backward has left in
  flight, whose gradients the step reads;
* inside a capture, refuse a step that a graph cannot repeat (`capturable_optimizers.py`), and fix
  the memory of gradients at its address, which the graph uses;
* in the first step of each optimizer, check for parameters that it does not train
  (`untrained_params.py`), and for those that each rank trains separately (`unowned_params.py`);
* before each step, copy the program's writes to unsharded parameters into the shards, and refuse a
  step that would lose other work (`lost_work.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardgrad.checks.lost_work import refuse_replaced_data, refuse_unreduced, require_own_state
from shardgrad.checks.unowned_params import warn_of_unowned
from shardgrad.checks.untrained_params import (
    check_first_step,
    concerns_unit,
    gradient_of,
    params_of,
)
from shardgrad.engine.param_group import FSDPParam, ParamGroup, managed_by
from shardgrad.engine.streams import is_capturing
from shardgrad.engine.tracing import outside_graphs
from shardgrad.errors import AsleepError


@dataclass
class _Watched:
    """Cached information about one optimizer.

    Attributes:
        owners: of the parameters it had when the rest was true; empty if that is to be looked up.
            A parameter that the program has assigned gets its owner in the next forward.
        groups: the param groups of its parameters.
        has_own_state: its state is known to be this rank's own; False once it has loaded another.
        concerns_unit: it has parameters that belong to a unit, or did.
        is_checked: its first step was checked.
        compare: ends the check of the step that runs.
        has_warned: True once it warned of parameters that no unit owns.
        trained: its parameters that had gradients when the last step began.
    """

    owners: list[FSDPParam | None] = field(default_factory=list)
    groups: list[weakref.ref[ParamGroup]] = field(default_factory=list)
    has_own_state: bool = False
    concerns_unit: bool = False
    is_checked: bool = False
    compare: Callable[[Optimizer], bool] | None = None
    has_warned: bool = False
    trained: set[FSDPParam] = field(default_factory=set)

    def loaded_state(self, _: Optimizer) -> None:
        """Called after the optimizer has loaded a state."""
        self.has_own_state = False


_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_watched: weakref.WeakKeyDictionary[Optimizer, _Watched] = weakref.WeakKeyDictionary()


def watch_optimizers_of(model: nn.Module) -> None:
    """Makes the hooks apply to optimizers of `model`'s parameters."""
    _register()
    _models.add(model)
    for watched in _watched.values():
        watched.owners = []


@cache  # once per process
def _register() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


@outside_graphs
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watched = _look_up(optimizer)
    groups = [group for each in watched.groups if (group := each()) is not None]
    is_captured = bool(groups) and is_capturing(groups[0].mesh.device)
    for group in groups:
        if group.shard_memory.is_virtual:
            from shardgrad.ops.virtual_memory import is_released

            if is_released(group.shard):
                raise AsleepError.of(group.where)
    if groups:
        if is_captured:
            from shardgrad.checks.capturable_optimizers import refuse_uncapturable_step

            refuse_uncapturable_step(optimizer)
        for group in groups:
            group.cancel_unshard()
            group.take_writes()
            group.grads.join()
            shard = group.grads.shard
            if shard is not None:
                refuse_replaced_data(shard)
                shard.look(is_captured=is_captured)
        refuse_unreduced(optimizer, groups)
        if not watched.has_own_state:
            require_own_state(optimizer)
            watched.has_own_state = True
    # Optimizers leave parameters without gradients as they are.
    watched.trained = {p for p in watched.owners if p is not None and gradient_of(p) is not None}
    is_first = watched.concerns_unit and not (watched.is_checked or is_captured)
    watched.compare = check_first_step(optimizer) if is_first else None


@outside_graphs
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watched = _watched.get(optimizer) or _look_up(optimizer)
    # A closure computes gradients in the step, and a program's own step may reset them.
    for p in watched.owners:
        if p is not None and (p in watched.trained or gradient_of(p) is not None):
            p.steps_taken += 1
    compare, watched.compare = watched.compare, None
    if compare is not None:
        watched.is_checked = True  # also if the program makes warnings errors
        watched.is_checked = compare(optimizer)


def _look_up(optimizer: Optimizer) -> _Watched:
    watched = _watched.get(optimizer)
    if watched is None:
        watched = _watched[optimizer] = _Watched()
        optimizer.register_load_state_dict_post_hook(watched.loaded_state)
    params = list(params_of(optimizer))
    owners = list(map(managed_by, params))
    if watched.owners == owners:
        return watched
    groups = dict.fromkeys(p.group for p in owners if p is not None)
    if not watched.has_warned and any(group.mesh.data_parallel_size > 1 for group in groups):
        watched.has_warned = warn_of_unowned(optimizer, _models)
    watched.owners, watched.groups = owners, list(map(weakref.ref, groups))
    watched.concerns_unit, watched.has_own_state = any(map(concerns_unit, params)), False
    return watched
