"""Noticing at the first step that a parameter is not being trained.

A run can go on for days while part of the model stands still, because an optimizer looks at another attribute
than the one that has the gradients, was given an empty list, frozen parameters, or those that fully_shard has
replaced since, or makes steps that vanish in rounding. So the first step of every optimizer over sharded
parameters is looked at, on a sample of each parameter: whoever has a gradient that is not zero has to move.
It is the only step for which the host waits. An optimizer over whole parameters, whose memory comes and goes
with their unit's forward, is refused there.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardgrad.engine.grad_group import grads_of
from shardgrad.engine.param import FSDPParam, is_replaced, is_unsharded_param, local_of, managed_by
from shardgrad.engine.param_group import group_of
from shardgrad.engine.pending_scale import ScaledGradient
from shardgrad.engine.streams import is_capturing
from shardgrad.errors import OptimizerParameterError

__all__ = ["UntrainedParameterWarning", "watch_first_steps"]

_SAMPLE_NUMEL = 4096


class UntrainedParameterWarning(UserWarning):
    """The first step of an optimizer left parameters as they were."""


class _Sample:
    """A parameter before the step: some of its values, and whether their gradient is zero.

    Args:
        managed: the parameter.
        grad: its gradient, a DTensor.
    """

    def __init__(self, managed: FSDPParam, grad: torch.Tensor) -> None:
        self.name = managed.name
        self._now = local_of(managed.sharded).detach().view(-1)[:_SAMPLE_NUMEL]
        self._before = self._now.clone()
        self._is_pushed = (_memory_of(grad).reshape(-1)[:_SAMPLE_NUMEL] != 0).any()

    def stands_still(self) -> torch.Tensor:
        """Returns whether no value moved although some should have; a bool scalar on the device."""
        return self._is_pushed & ~(self._now != self._before).any()


def _memory_of(grad: torch.Tensor) -> torch.Tensor:
    """Returns a gradient's local tensor; one that owes a factor is not made to pay for being looked at."""
    if isinstance(grad, ScaledGradient):
        return grad.unpaid()
    return grad.to_local().detach() if isinstance(grad, DTensor) else grad.detach()


class _Watch:
    """Looks at one optimizer until it has taken a step that says something.

    Attributes:
        is_over: True after such a step.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._samples: list[_Sample] = []
        self._without: list[str] = []

    def before(self, optimizer: Optimizer) -> None:
        """Takes samples.

        Raises:
            OptimizerParameterError: the optimizer has whole parameters, whose memory comes and goes.
        """
        whole = sum(map(is_unsharded_param, _params(optimizer)))
        if whole:
            raise OptimizerParameterError(
                f"{type(optimizer).__name__} was built over {whole} whole parameters, as a forward or "
                "unshard() leaves them",
                expected="sharded parameters: the model's before its first forward, or after reshard()",
                got="parameters whose memory is freed between steps",
                fix="model.reshard(), on every unit that is whole, before the optimizer is built",
            )
        self._samples, self._without = [], []
        moving = [group for group in optimizer.param_groups if float(group.get("lr", 1.0)) != 0]
        for param in (param for group in moving for param in group["params"]):
            managed = managed_by(param)
            if managed is None or not group_of(managed).is_flat:
                continue  # a tensor subclass may not even have views
            grad = getattr(param, group_of(managed).gradient_policy.attribute, None)
            if grad is not None:
                self._samples.append(_Sample(managed, grad))
            elif param.requires_grad:
                self._without.append(managed.name)

    def after(self, optimizer: Optimizer) -> None:
        """Compares, and warns of what did not move."""
        samples, self._samples = self._samples, []
        verdicts = torch.stack([sample.stands_still() for sample in samples]).tolist() if samples else []
        still = [sample.name for sample, stuck in zip(samples, verdicts, strict=True) if stuck]
        if _is_meant_to_stand_still(optimizer):
            return  # the next step will tell
        self.is_over = True
        if still:
            _warn(
                optimizer,
                f"parameters did not move, although they have gradients: {_few(still)}",
                "does the optimizer read the attribute that GradientPolicy binds (grad or decoupled_grad), "
                "and is a step more than half a unit in the last place of a 16-bit weight (else keep a "
                "master)?",
            )
        if self._without:
            _warn(
                optimizer,
                f"parameters require a gradient and have none: {_few(self._without)}",
                "was the loss computed from them, and backward() called before step()?",
            )
        replaced = sum(map(is_replaced, _params(optimizer)))
        if replaced:
            _warn(
                optimizer,
                f"{replaced} parameters were those from before fully_shard, which nothing computes with",
                "was the optimizer built after the last fully_shard?",
            )
        idle = [str(i) for i, group in enumerate(optimizer.param_groups) if _is_idle(group)]
        if idle:
            _warn(
                optimizer,
                f"groups have no parameter that requires a gradient: {_few(idle)}",
                "is the rule that chose their parameters right, and was nothing frozen by accident?",
            )


def _is_meant_to_stand_still(optimizer: Optimizer) -> bool:
    """True if the learning rate is 0, as a warm-up begins, or the gradients are not finite."""
    if all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups):
        return True
    verdicts = [getattr(optimizer, "found_inf", None)]
    for param in _params(optimizer):
        managed = managed_by(param)
        if managed is not None and (shard := grads_of(group_of(managed)).shard):
            verdicts.append(shard.nonfinite)
    return any(bool(verdict.item()) for verdict in {id(v): v for v in verdicts if v is not None}.values())


def _is_idle(group: dict[str, Any]) -> bool:
    return not any(param.requires_grad for param in group["params"])


def _params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _warn(optimizer: Optimizer, what: str, question: str) -> None:
    warnings.warn(
        f"shardgrad: in the first step of {type(optimizer).__name__} {what}. To check: {question}",
        UntrainedParameterWarning,
        stacklevel=4,
    )


_watches: weakref.WeakKeyDictionary[Optimizer, _Watch] = weakref.WeakKeyDictionary()


def _watch(optimizer: Optimizer) -> _Watch | None:
    """Returns the watch over an optimizer, or None if there is nothing (more) to look at."""
    watch = _watches.get(optimizer)
    if watch is None:
        watch = _watches[optimizer] = _Watch()
        watch.is_over = not any(
            managed_by(param) is not None or is_replaced(param) or is_unsharded_param(param)
            for param in _params(optimizer)
        )
    if watch.is_over:
        return None
    first = next(_params(optimizer))
    return None if is_capturing(first.device) else watch


@torch.no_grad()
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watch = _watch(optimizer)
    if watch is not None:
        watch.before(optimizer)


@torch.no_grad()
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    watch = _watch(optimizer)
    if watch is not None:
        watch.after(optimizer)


@cache
def watch_first_steps() -> None:
    """Begins to watch optimizers; once is enough."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
