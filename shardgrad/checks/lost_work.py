"""What a program has done that the next optimizer step would lose, without a word, is refused.

* A gradient that was never reduced, since the last backward before the step ran without
  synchronization.
* A hook of `register_hook` on a sharded parameter: autograd meets the unsharded one, which has
  none.
* Optimizer state that another rank has saved.
* Gradients whose `data` was replaced, which changes no value of a DTensor.

Writes to unsharded parameters are not lost: `ParamGroup.take_writes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from shardgrad.engine.grad_group import grads_of
from shardgrad.engine.grad_shard import GradShard
from shardgrad.engine.param import managed_by
from shardgrad.engine.param_group import ParamGroup
from shardgrad.errors import GradientError, listed
from shardgrad.sharding.dtensor import require_own_shards

__all__ = ["refuse_hooks", "refuse_replaced_data", "refuse_unreduced", "require_own_state"]


def refuse_unreduced(optimizer: Optimizer, groups: Iterable[ParamGroup]) -> None:
    """Refuses a step after a backward that did not synchronize: its gradients wait on this rank.

    A program that leaves some units unsynchronized, and not others, does so on purpose.

    Raises:
        GradientError: the gradients of all groups of the step wait.
    """
    waiting = [grads for grads in map(grads_of, groups) if grads.params]
    unreduced = [p for grads in waiting if grads.summed for p in grads.params]
    if unreduced and all(grads.is_due for grads in waiting):
        raise GradientError(
            f"a step of {type(optimizer).__name__} would not see gradients that are not reduced",
            expected="the last backward before each step with set_requires_gradient_sync(True)",
            got=f"sums on each rank, of {listed([p.name for p in unreduced])}",
            where=f"rank {dist.get_rank()}",
            fix="model.set_requires_gradient_sync(True) before the last backward, also where a "
            "window of micro-batches is not full; or model.zero_grad() to drop them",
        )


def refuse_replaced_data(shard: GradShard) -> None:
    """Refuses gradients after `param.grad.data = dtensor`, which leaves every value as it was.

    Raises:
        GradientError: there is one.
    """
    if not shard.have_own_data():
        raise GradientError(
            "the data of gradients was replaced, which changes no value of a DTensor",
            expected="gradients changed in place, or other gradients",
            got="param.grad.data = another DTensor",
            where=f"rank {dist.get_rank()}",
            fix="param.grad.copy_(new), or param.grad = new",
        )


def refuse_hooks(params: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Refuses parameters with hooks that would never run.

    Args:
        params: with their names.

    Raises:
        GradientError: there is one.
    """
    for param, name in params:
        if param._backward_hooks:
            raise GradientError(
                f"a hook on {name} never runs: autograd meets the unsharded parameter, which has "
                "none",
                expected="hooks of modules, or post-accumulate hooks of sharded parameters",
                got=f"{len(param._backward_hooks)} from register_hook",
                where=f"parameter {name}",
                fix="param.register_post_accumulate_grad_hook(hook) after fully_shard; the hook "
                "gets the parameter, whose grad is reduced",
            )


def require_own_state(optimizer: Optimizer) -> None:
    """Refuses optimizer state that another rank has saved.

    Raises:
        ForeignParameterError: naming what and who.
    """
    for param, state in optimizer.state.items():
        managed = managed_by(param) if isinstance(param, torch.Tensor) else None
        if managed is not None and isinstance(state, Mapping):
            require_own_shards((f"{key} of {managed.name}", value) for key, value in state.items())
