"""Noticing that an optimizer has moved sharded parameters.

Version counters do not tell: fused and foreach optimizers reach the local tensors of a DTensor below the
place where autograd counts. torch runs a hook after every optimizer's step, which does.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .managed_param import is_sharded_by_us

__all__ = ["steps_taken"]

_steps = 0


def steps_taken() -> int:
    """Returns how many steps optimizers over sharded parameters have taken in this process."""
    return _steps


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _steps
    if any(is_sharded_by_us(param) for group in optimizer.param_groups for param in group["params"]):
        _steps += 1


register_optimizer_step_post_hook(_count)
