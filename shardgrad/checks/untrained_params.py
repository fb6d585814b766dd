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
from collections.abc import Callable, Iterator

import torch
from torch.optim.optimizer import Optimizer

from shardgrad.checks.lost_work import refuse_hooks
from shardgrad.engine.param_group import (
    FSDPParam,
    fsdp_param_of,
    is_claimed,
    is_unsharded_param,
    managed_by,
)
from shardgrad.errors import OptimizerParameterError, listed
from shardgrad.sharding.dtensor import local_of

_SAMPLE_NUMEL = 4096
_ROUNDING = 8 * torch.finfo(torch.float32).eps


class UntrainedParameterWarning(UserWarning):
    """The first step of an optimizer did not change some of its parameters."""


def gradient_of(managed: FSDPParam) -> torch.Tensor | None:
    """Returns the gradient that a unit has bound to its parameter, if there is one."""
    attribute = managed.group.gradient_policy.attribute
    grad: torch.Tensor | None = getattr(managed.sharded, attribute, None)
    return grad


def concerns_unit(param: torch.Tensor) -> bool:
    """Returns whether a parameter belongs to a unit, or did before `fully_shard` replaced it."""
    return fsdp_param_of(param) is not None or is_claimed(param)


def _refuse_unused(optimizer: Optimizer) -> None:
    """Refuses parameters that the model does not use at the optimizer's step."""
    unsharded = sum(map(is_unsharded_param, params_of(optimizer)))
    if unsharded:
        raise OptimizerParameterError(
            f"{type(optimizer).__name__} was built over {unsharded} unsharded parameters, left "
            "by a forward or unshard()",
            expected="the model's parameters before its first forward, or after reshard()",
            got="parameters whose memory reshard() frees",
            fix="module.reshard() on every unsharded unit, before building the optimizer",
        )
    replaced = sum(is_claimed(p) for p in params_of(optimizer) if p.requires_grad)
    if replaced:
        raise OptimizerParameterError(
            f"{type(optimizer).__name__} was built over {replaced} parameters from before "
            "fully_shard, which the model no longer uses",
            expected="the model's parameters after the last fully_shard",
            got="parameters that fully_shard has replaced",
            fix="build the optimizer after fully_shard",
        )


def check_first_step(optimizer: Optimizer) -> Callable[[Optimizer], bool]:
    """Refuses parameters that a first step could not train, and takes samples. Called before it.

    Returns:
        What to call with the optimizer after the step. It compares, warns of parameters that did
        not change, and returns False after a step that changes nothing on purpose, so that the next
        one counts. It holds the parameters, but not the optimizer, which a failed step may leave.

    Raises:
        OptimizerParameterError: the optimizer has unsharded parameters, whose memory is freed, or
            those from before `fully_shard`.
        GradientError: a parameter has a hook that never runs.
    """
    _refuse_unused(optimizer)
    known = ((param, managed_by(param)) for param in params_of(optimizer))
    refuse_hooks((param, managed.name) for param, managed in known if managed is not None)
    # Name, values, their copy from before the step, and the size of the gradient.
    samples: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    without: list[FSDPParam] = []
    training = [group for group in optimizer.param_groups if float(group.get("lr", 1.0)) != 0]
    for param in (param for group in training for param in group["params"]):
        managed = managed_by(param)
        if managed is None or not managed.group.is_flat:
            continue  # a tensor subclass may not even have views
        grad = gradient_of(managed)
        if grad is not None:
            if param.itemsize > 2 or not _keeps_small_steps(optimizer):
                slope, values = (_sample_of(each) for each in (grad, param))
                size = torch.linalg.vector_norm(slope, dtype=torch.float64)
                samples.append((managed.name, values, values.clone(), size))
        elif param.requires_grad:
            without.append(managed)

    def compare(optimizer: Optimizer) -> bool:
        unchanged = []
        if samples:
            device = samples[0][1].device  # units that are offloaded are on another one
            sizes = torch.stack([size.to(device) for *_, size in samples])
            stands = torch.stack(
                [(now == before).all().to(device) for _, now, before, _ in samples]
            )
            verdicts = (stands & (sizes > _ROUNDING * sizes.amax())).tolist()
            unchanged = [name for (name, *_), bad in zip(samples, verdicts, strict=True) if bad]
        if not training or _is_skipped(optimizer):  # a warm-up may begin with a rate of 0
            return False
        if unchanged:
            _warn(
                optimizer,
                f"parameters did not change although they have gradients: {listed(unchanged, 5)}",
                "the optimizer reads the attribute that GradientPolicy binds (grad or "
                "decoupled_grad), and that a step is more than half a unit in the last place of a "
                "16-bit weight (otherwise keep a master copy)",
            )
        # A closure computes the gradients within the step.
        missing = [each.name for each in without if gradient_of(each) is None]
        if missing:
            _warn(
                optimizer,
                f"parameters that require a gradient had none: {listed(missing, 5)}",
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
        return True

    return compare


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sample of the values of a tensor on this rank."""
    return local_of(tensor).detach().reshape(-1)[:_SAMPLE_NUMEL]


def _is_skipped(optimizer: Optimizer) -> bool:
    """Returns whether loss scaling or clipping has found gradients that are not finite. torch's
    scaler sets the number 0, not a tensor, if it found no gradient.
    """
    verdicts = {getattr(optimizer, "found_inf", None)}
    for param in params_of(optimizer):
        managed = managed_by(param)
        if managed is not None and (shard := managed.group.grads.shard):
            verdicts.update(shard.verdicts([managed.sharded]))
    return any(verdicts)


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
        stacklevel=5,
    )
