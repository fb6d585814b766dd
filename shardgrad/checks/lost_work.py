"""Refuses an optimizer step that would silently discard something the program did before it:

* gradients that were never reduced, because the last backward before the step ran without
  synchronization;
* a hook of `register_hook` on a sharded parameter, or any hook from before `fully_shard`, which
  never runs because autograd sees the unsharded parameter;
* optimizer state that another rank has saved;
* an assignment to `data` of a gradient, which does not change the values of a DTensor.

Writes to unsharded parameters are not lost: see `ParamGroup.take_writes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param_group import ParamGroup, managed_by
from shardgrad.errors import GradientError, listed
from shardgrad.sharding.dtensor import require_own_shards


def refuse_unreduced(optimizer: Optimizer, groups: Iterable[ParamGroup]) -> None:
    """Refuses a step after a backward that did not reduce gradients.

    If only some groups are unreduced, the program is assumed to do that on purpose, unless the
    backward did not end: then units that it reached have lost their gradients.

    Raises:
        GradientError: the gradients of all groups of the step are unreduced, or the backward was
            cut short.
    """
    waiting = [grads for grads in (group.grads for group in groups) if grads.params]
    unreduced = [p for grads in waiting if grads.summed for p in grads.params]
    # Autograd drops the callback, without a call, in a backward that raises. Compiled autograd does
    # so in every one.
    schedulers = filter(None, (grads.scheduler for grads in waiting))
    is_cut_short = any(each.backward_running and each.callback() is None for each in schedulers)
    if is_cut_short or (unreduced and all(grads.is_due for grads in waiting)):
        raise GradientError(
            f"{type(optimizer).__name__} would step without gradients that have not been reduced",
            expected="a backward that ends, after set_requires_gradient_sync(True), in each step",
            got="a backward that an exception or compiled autograd has cut short"
            if is_cut_short
            else f"unreduced gradients of {listed([p.name for p in unreduced])}",
            where=f"rank {dist.get_rank()}",
            fix="model.reset_iter_state(), which keeps only gradients of earlier backwards, or "
            "another forward and backward; torch._dynamo.config.compiled_autograd = False"
            if is_cut_short
            else "model.set_requires_gradient_sync(True) before the last backward, even if the "
            "last window of micro-batches is incomplete; or model.zero_grad() to drop them",
        )


def refuse_replaced_data(shard: GradShard) -> None:
    """Refuses a gradient after `param.grad.data = dtensor`, which does not change its values.

    Raises:
        GradientError: there is such a gradient.
    """
    if not shard.have_own_data():
        raise GradientError(
            "assigning to param.grad.data does not change the values of a DTensor",
            expected="gradients that are changed in place, or replaced",
            got="param.grad.data = another DTensor",
            where=f"rank {dist.get_rank()}",
            fix="param.grad.copy_(new), or param.grad = new",
        )


def refuse_hooks(params: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Refuses parameters with hooks that would never run.

    Args:
        params: (parameter, name) pairs.

    Raises:
        GradientError: there is such a parameter.
    """
    for param, name in params:
        # Those of a sharded parameter run once its gradient is reduced.
        is_lost = param._post_accumulate_grad_hooks and managed_by(param) is None
        if param._backward_hooks or is_lost:
            raise GradientError(
                f"a hook on {name} never runs: autograd uses the unsharded parameter, which "
                "does not have it",
                expected="hooks on modules, or post-accumulate hooks on sharded parameters",
                got="param.register_hook(hook), or a hook from before fully_shard",
                where=f"parameter {name}",
                fix="param.register_post_accumulate_grad_hook(hook) after fully_shard; the hook "
                "gets the parameter, with its reduced gradient",
            )


def require_own_state(optimizer: Optimizer) -> None:
    """Refuses optimizer state that another rank has saved.

    Raises:
        ForeignParameterError: there is such state; the error names it and the rank.
    """
    # Of this package's optimizers, `state` is a property that notes that the program has read it.
    entries = getattr(optimizer, "_state", None)
    for param, state in (optimizer.state if entries is None else entries).items():
        managed = managed_by(param) if isinstance(param, torch.Tensor) else None
        if managed is not None and isinstance(state, Mapping):
            require_own_shards((f"{key} of {managed.name}", value) for key, value in state.items())
