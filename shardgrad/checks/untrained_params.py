"""Checks in an optimizer's first step that it trains all of its parameters.

A run can continue for days while part of the model does not change: the optimizer reads another
attribute than the one that holds the gradients; it got an empty list, frozen parameters, or
parameters that `fully_shard` has replaced since; or its updates are lost to rounding. So the first
step of every optimizer over sharded parameters is checked on a sample of each parameter. A
parameter with a gradient must change, unless its gradient is rounding error compared with the
largest, like that of a bias before a normalization. The host waits for the device in this step
only. The check also refuses an optimizer over unsharded parameters, whose memory is freed after
their unit's forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch.optim import SGD
from torch.optim.optimizer import Optimizer

from shardgrad.checks.lost_work import refuse_hooks
from shardgrad.engine.grad_group import grads_of
from shardgrad.engine.param import (
    FSDPParam,
    fsdp_param_of,
    is_replaced,
    is_unsharded_param,
    managed_by,
)
from shardgrad.engine.param_group import group_of
from shardgrad.errors import OptimizerParameterError, listed

__all__ = [
    "FirstStepCheck",
    "UntrainedParameterWarning",
    "concerns_unit",
    "params_of",
    "refuse_state_of_other_dtype",
]

_SAMPLE_NUMEL = 4096
_ROUNDING = 8 * torch.finfo(torch.float32).eps


class UntrainedParameterWarning(UserWarning):
    """The first step of an optimizer did not change some of its parameters."""


def refuse_state_of_other_dtype(optimizer: Optimizer) -> None:
    """Refuses an optimizer of torch whose moments have another dtype than their parameters.

    Raises:
        OptimizerParameterError: the model was cast after the optimizer's first step.
    """
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, SGD):
        return  # others may use another dtype on purpose, and SGD accumulates in any dtype
    for param in params_of(optimizer):
        managed = managed_by(param)
        if managed is None:
            continue
        for key, value in optimizer.state.get(param, {}).items():
            is_moment = isinstance(value, torch.Tensor) and value.ndim > 0
            if is_moment and value.is_floating_point() and value.dtype != param.dtype:
                raise OptimizerParameterError(
                    f"the model was cast to {param.dtype} after "
                    f"{type(optimizer).__name__} created its state",
                    expected=f"{key} in {param.dtype}",
                    got=f"{key} in {value.dtype}",
                    where=f"parameter {managed.name}",
                    fix="cast the model before building the optimizer, or use "
                    "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16); to cast the "
                    "state, optimizer.load_state_dict(optimizer.state_dict())",
                )


def _grad_of(managed: FSDPParam) -> torch.Tensor | None:
    """Returns the gradient that a unit has bound to its parameter, if there is one."""
    attribute = group_of(managed).gradient_policy.attribute
    grad: torch.Tensor | None = getattr(managed.sharded, attribute, None)
    return grad


def concerns_unit(param: torch.Tensor) -> bool:
    """Returns whether a parameter belongs to a unit, or did before `fully_shard` replaced it."""
    return fsdp_param_of(param) is not None or is_replaced(param)


class FirstStepCheck:
    """Checks the first step of one optimizer. Ignores steps that change nothing on purpose, and
    steps inside a capture.

    Attributes:
        is_over: True once a step was checked. Later steps are not.
    """

    def __init__(self) -> None:
        self.is_over = False
        # Name, values, their copy from before the step, and the size of the gradient.
        self._samples: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._without: list[FSDPParam] = []
        self._is_open = False  # True while a step that is checked runs

    @torch.no_grad()
    def before(self, optimizer: Optimizer, *, is_captured: bool) -> None:
        """Takes samples. Called before a step.

        Raises:
            OptimizerParameterError: the optimizer has unsharded parameters, whose memory is freed,
                or those from before `fully_shard`.
            GradientError: a parameter has a hook that never runs.
        """
        self._is_open = not (self.is_over or is_captured)
        if not self._is_open:
            return
        unsharded = sum(map(is_unsharded_param, params_of(optimizer)))
        if unsharded:
            raise OptimizerParameterError(
                f"{type(optimizer).__name__} was built over {unsharded} unsharded parameters, left "
                "by a forward or unshard()",
                expected="the model's parameters before its first forward, or after reshard()",
                got="parameters whose memory reshard() frees",
                fix="module.reshard() on every unsharded unit, before building the optimizer",
            )
        replaced = sum(is_replaced(p) for p in params_of(optimizer) if p.requires_grad)
        if replaced:
            raise OptimizerParameterError(
                f"{type(optimizer).__name__} was built over {replaced} parameters from before "
                "fully_shard, which the model no longer uses",
                expected="the model's parameters after the last fully_shard",
                got="parameters that fully_shard has replaced",
                fix="build the optimizer after fully_shard",
            )
        known = ((param, managed_by(param)) for param in params_of(optimizer))
        refuse_hooks((param, managed.name) for param, managed in known if managed is not None)
        self._samples, self._without = [], []
        training = [group for group in optimizer.param_groups if float(group.get("lr", 1.0)) != 0]
        for param in (param for group in training for param in group["params"]):
            managed = managed_by(param)
            if managed is None or not group_of(managed).is_flat:
                continue  # a tensor subclass may not even have views
            grad = _grad_of(managed)
            if grad is not None:
                if param.itemsize > 2 or not _keeps_small_steps(optimizer):
                    slope, values = (_sample_of(each) for each in (grad, param))
                    size = torch.linalg.vector_norm(slope, dtype=torch.float64)
                    self._samples.append((managed.name, values, values.clone(), size))
            elif param.requires_grad:
                self._without.append(managed)

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Compares, and warns of parameters that did not change. Called after a step."""
        if not self._is_open:
            return
        samples, self._samples = self._samples, []
        unchanged = []
        if samples:
            sizes = torch.stack([size for *_, size in samples])
            stands = torch.stack([(now == before).all() for _, now, before, _ in samples])
            verdicts = (stands & (sizes > _ROUNDING * sizes.amax())).tolist()
            unchanged = [name for (name, *_), bad in zip(samples, verdicts, strict=True) if bad]
        self.is_over = not _changes_nothing(optimizer)
        if not self.is_over:
            return
        if unchanged:
            _warn(
                optimizer,
                f"parameters did not change although they have gradients: {listed(unchanged, 5)}",
                "the optimizer reads the attribute that GradientPolicy binds (grad or "
                "decoupled_grad), and that a step is more than half a unit in the last place of a "
                "16-bit weight (otherwise keep a master copy)",
            )
        # A closure computes the gradients within the step.
        without = [each.name for each in self._without if _grad_of(each) is None]
        if without:
            _warn(
                optimizer,
                f"parameters that require a gradient had none: {listed(without, 5)}",
                "the loss depends on them, and that backward() was called before step()",
            )
        idle = [
            str(i)
            for i, group in enumerate(optimizer.param_groups)
            if not any(param.requires_grad for param in group["params"])
        ]
        if idle:
            _warn(
                optimizer,
                f"groups had no parameter that requires a gradient: {listed(idle, 5)}",
                "they have the intended parameters, and that none was frozen by accident",
            )


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sample of the values of a tensor on this rank."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach().reshape(-1)[:_SAMPLE_NUMEL]


def _changes_nothing(optimizer: Optimizer) -> bool:
    """True if the learning rate is 0, as at the start of a warm-up, or the gradients are not
    finite.
    """
    if all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups):
        return True
    verdicts = [getattr(optimizer, "found_inf", None)]
    for param in params_of(optimizer):
        managed = managed_by(param)
        if managed is not None and (shard := grads_of(group_of(managed)).shard):
            verdicts.append(shard.nonfinite)
    return any(
        bool(verdict.item()) for verdict in {id(v): v for v in verdicts if v is not None}.values()
    )


def _keeps_small_steps(optimizer: Optimizer) -> bool:
    """Returns whether 16-bit weights are rounded copies of exact ones, so that a step need not
    change them.
    """
    # The second is the name in TransformerEngine and apex.
    return any(getattr(optimizer, name, False) for name in ("keeps_small_steps", "master_weights"))


def params_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yields the parameters of an optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _warn(optimizer: Optimizer, what: str, check: str) -> None:
    warnings.warn(
        f"shardgrad: in the first step of {type(optimizer).__name__}, {what}. Check that {check}.",
        UntrainedParameterWarning,
        stacklevel=6,
    )
