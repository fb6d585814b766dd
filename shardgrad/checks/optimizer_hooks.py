"""Noticing that an optimizer has moved sharded parameters.

Version counters do not tell: fused and foreach optimizers reach the local tensors of a DTensor below the
place where autograd counts. torch runs a hook after every optimizer's step, which does.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from shardgrad.engine.param import managed_by
from shardgrad.engine.param_group import ParamGroup, group_of

__all__ = ["notice_optimizer_steps"]

# Which groups an optimizer moves, for the number of parameters it had when that was found out.
_moved: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[ParamGroup]]]]
_moved = weakref.WeakKeyDictionary()


def _groups(optimizer: Optimizer) -> list[weakref.ref[ParamGroup]]:
    count = sum(len(optim_group["params"]) for optim_group in optimizer.param_groups)
    known = _moved.get(optimizer)
    if known is None or known[0] != count:
        params = [param for optim_group in optimizer.param_groups for param in optim_group["params"]]
        groups = {group_of(managed): None for param in params if (managed := managed_by(param)) is not None}
        known = _moved[optimizer] = count, [weakref.ref(group) for group in groups]
    return known[1]


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for reference in _groups(optimizer):
        group = reference()
        if group is not None:
            group.steps_taken += 1


@cache
def notice_optimizer_steps() -> None:
    """Begins to count the steps of every optimizer in `ParamGroup.steps_taken`; once is enough."""
    register_optimizer_step_post_hook(_count)
