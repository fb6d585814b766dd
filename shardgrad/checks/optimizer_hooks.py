"""The package's hooks on optimizer steps. No other file registers any.

The engine has to know when an optimizer steps. Version counters do not show it: fused and foreach
optimizers write the local tensors of DTensors below the level at which autograd counts versions.
torch has hooks on one optimizer, whose instance the model does not know, and hooks on all
optimizers of the process. So the first sharded model registers a global hook before steps and one
after them. Both return immediately for an optimizer without parameters of a sharded model. They are
never removed: a model may be garbage collected during a step, while torch iterates over its hooks.

The hooks do the following:

* after a step, mark parameters that a unit keeps unsharded as stale (`ParamGroup.steps_taken`);
* before a step, wait for all-gathers that a failed forward has left, since they read what the step
  writes;
* inside a capture, refuse a step that a graph cannot repeat (`capturable_optimizers.py`), and fix
  the memory of gradients at its address, which the graph uses;
* after `model.half()`, refuse a step whose state still has the former dtype
  (`untrained_params.py`);
* in the first step of each optimizer, check for parameters that it does not train
  (`untrained_params.py`), and for those that each rank trains separately (`unowned_params.py`);
* before each step, copy the program's writes to unsharded parameters into the shards, and refuse a
  step that would lose other work (`lost_work.py`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardgrad.checks.lost_work import refuse_replaced_data, refuse_unreduced, require_own_state
from shardgrad.checks.unowned_params import warn_of_unowned
from shardgrad.checks.untrained_params import (
    FirstStepCheck,
    concerns_unit,
    params_of,
    refuse_state_of_other_dtype,
)
from shardgrad.engine.grad_group import grads_of
from shardgrad.engine.param import managed_by
from shardgrad.engine.param_group import ParamGroup, group_of
from shardgrad.engine.streams import is_capturing
from shardgrad.engine.tracing import outside_graphs

__all__ = ["hooks"]


@dataclass
class _Watched:
    """Cached information about one optimizer.

    Attributes:
        version: the version of the optimizer and the models at which this was computed; see
            `OptimizerHooks._version`.
        groups: the engine's parameter groups that its steps write; empty if it has no parameter of
            a sharded model.
        dtypes: the dtypes of these groups' parameters.
        state_id: the id of its state when that was last checked to be this rank's own.
        first_step: checks its first step; None if there is nothing to check.
        has_warned: True once it warned of parameters that no unit owns.
    """

    version: tuple[int, int] = (0, 0)
    groups: list[weakref.ref[ParamGroup]] = field(default_factory=list)
    dtypes: list[torch.dtype] | None = None
    state_id: int = 0
    first_step: FirstStepCheck | None = None
    has_warned: bool = False


class OptimizerHooks:
    """One hook before and one after the steps of all optimizers."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._changes = 0  # number of times that a model was sharded or cast
        self._watched: weakref.WeakKeyDictionary[Optimizer, _Watched] = weakref.WeakKeyDictionary()

    def add(self, model: nn.Module) -> None:
        """Makes the hooks apply to optimizers of `model`'s parameters."""
        if not self._changes:
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)
        self._models.add(model)
        self._changes += 1

    def note_cast(self) -> None:
        """Called after parameters of a sharded model were cast. Makes every optimizer be examined
        again before its next step.
        """
        self._changes += 1

    @outside_graphs
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._look_up(optimizer)
        groups = [group for each in watched.groups if (group := each()) is not None]
        is_captured = bool(groups) and is_capturing(groups[0].mesh.device)
        if groups:
            if is_captured:
                from shardgrad.checks.capturable_optimizers import refuse_uncapturable_step

                refuse_uncapturable_step(optimizer)
            for group in groups:
                group.cancel_unshard()
                group.take_writes()
                shard = grads_of(group).shard
                if shard is not None:
                    refuse_replaced_data(shard)
                    shard.look(is_captured=is_captured)
            refuse_unreduced(optimizer, groups)
            if watched.state_id != id(optimizer.state):  # loaded
                watched.state_id = id(optimizer.state)
                require_own_state(optimizer)
        if watched.first_step is not None:
            watched.first_step.before(optimizer, is_captured=is_captured)

    @outside_graphs
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watched = self._look_up(optimizer)
        for reference in watched.groups:
            group = reference()
            if group is not None:
                group.steps_taken += 1
        if watched.first_step is not None:
            watched.first_step.after(optimizer)

    def _look_up(self, optimizer: Optimizer) -> _Watched:
        watched, version = self._watched.setdefault(optimizer, _Watched()), self._version(optimizer)
        if watched.version != version:
            self._examine(optimizer, watched)
            watched.version = version
        return watched

    def _examine(self, optimizer: Optimizer, watched: _Watched) -> None:
        params = list(params_of(optimizer))
        groups = {
            group_of(managed): None
            for param in params
            if (managed := managed_by(param)) is not None
        }
        dtypes = [group.dtype for group in groups]
        if watched.dtypes not in (None, dtypes):
            refuse_state_of_other_dtype(optimizer)
        if watched.first_step is None and any(map(concerns_unit, params)):
            watched.first_step = FirstStepCheck()
        if not watched.has_warned and any(group.mesh.data_parallel_size > 1 for group in groups):
            watched.has_warned = warn_of_unowned(optimizer, self._models)
        watched.groups, watched.dtypes = list(map(weakref.ref, groups)), dtypes
        watched.state_id = 0

    def _version(self, optimizer: Optimizer) -> tuple[int, int]:
        """Returns numbers that change when the optimizer gets parameters or a model is sharded or
        cast.
        """
        return sum(len(group["params"]) for group in optimizer.param_groups), self._changes


hooks = OptimizerHooks()
