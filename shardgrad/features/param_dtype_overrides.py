"""Dtypes of single parameters, from torch 2.15 on: the policy's `param_dtype_override_fn`, and
`grad_dtype`.

`fully_shard.py` imports this file where torch has them. Parameters with different ones are in
different param groups, each with a policy for all of its parameters. Without a `reduce_dtype` they
are reduced, as in torch, in one that holds the gradients of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardgrad.engine.param_group import ParamGroup
from shardgrad.errors import OptionError, UnsupportedParameterError
from shardgrad.policies import GradientPolicy, ParamDtypes

_OVERRIDE = "param_dtype_override_fn"


def dtypes_of(
    names: Mapping[nn.Parameter, str],
    together: Callable[[nn.Parameter], object],
    mp_policy: MixedPrecisionPolicy,
    gradient_policy: GradientPolicy,
) -> dict[nn.Parameter, ParamDtypes]:
    """Works out the dtypes of a unit's parameters, asking the override function once for each.

    Args:
        names: parameter -> name.
        together: a key function; parameters with equal keys are reduced in one dtype.
        mp_policy: the policy of the unit.
        gradient_policy: the policy of the call; its dtype takes precedence over a parameter's
            `grad_dtype`.

    Raises:
        OptionError: the override function returned something else than None, `param_dtype` or the
            parameter's dtype.
        UnsupportedParameterError: `grad_dtype=None` without `reduce_dtype`, so that no dtype is
            known.
    """
    wishes = {param: _grad_dtype(param, name, mp_policy) for param, name in names.items()}
    if getattr(mp_policy, _OVERRIDE, None) is None and not any(wishes.values()):
        return dict.fromkeys(names, ParamDtypes(mp_policy, gradient_policy))
    reduce_dtypes: dict[object, torch.dtype] = {}
    for key in {together(param) for param, wish in wishes.items() if wish is not None}:
        dtypes = [
            wish or p.dtype for p, wish in wishes.items() if together(p) == key and p.requires_grad
        ]
        if dtypes:
            reduce_dtypes[key] = reduce(torch.promote_types, dtypes)
    found = {}
    for param, name in names.items():
        policy = replace(
            _resolved(mp_policy, param, name),
            reduce_dtype=mp_policy.reduce_dtype or reduce_dtypes.get(together(param)),
        )
        gradient = gradient_policy.dtype or wishes[param]
        found[param] = ParamDtypes(policy, replace(gradient_policy, dtype=gradient))
    return found


def _resolved(policy: MixedPrecisionPolicy, param: nn.Parameter, name: str) -> MixedPrecisionPolicy:
    """Returns the policy of one parameter: with its `param_dtype`, and no function."""
    override = getattr(policy, _OVERRIDE, None)
    if override is None:
        return policy
    dtype = override(param)
    if not any(dtype is each for each in (None, policy.param_dtype, param.dtype)):
        raise OptionError(
            "param_dtype_override_fn must return None, param_dtype, or the parameter's original "
            "dtype",
            expected=f"None, {policy.param_dtype} or {param.dtype}",
            got=repr(dtype),
            where=f"parameter {name}",
        )
    return replace(without_override(policy), param_dtype=dtype or policy.param_dtype)


def without_override(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Returns the policy without its override function, so that ranks can compare it."""
    if getattr(policy, _OVERRIDE, None) is None:
        return policy
    change: dict[str, Any] = {_OVERRIDE: None}
    return replace(policy, **change)


def _grad_dtype(param: nn.Parameter, name: str, policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """Returns the dtype of a parameter's gradient; None for the parameter's own dtype."""
    if not _has_grad_dtype(param):
        return None
    dtype: torch.dtype | None = param.grad_dtype or policy.reduce_dtype
    if dtype is None:
        raise UnsupportedParameterError(
            f"parameter {name} has grad_dtype=None, and mp_policy has no reduce_dtype for its "
            "gradient",
            expected="a grad_dtype, or mp_policy.reduce_dtype",
            got="None for both",
            where=f"parameter {name}",
            fix="mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32)",
        )
    return dtype


def _has_grad_dtype(param: torch.Tensor) -> bool:
    if not param.is_floating_point():
        return False
    return bool(param._has_grad_dtype_override)  # type: ignore[attr-defined]


def keep_grad_dtypes(group: ParamGroup) -> None:
    """Sets the `grad_dtype` that the program requested on the sharded parameters."""
    policy = group.gradient_policy
    if policy.dtype is not None and not policy.decoupled:
        for p in group.params:
            p.sharded.grad_dtype = policy.dtype


def refuse_late_grad_dtypes(group: ParamGroup) -> None:
    """Refuses, at lazy init, a `grad_dtype` that a program has set on a sharded parameter.

    Raises:
        UnsupportedParameterError: it differs from what the group was made for.
    """
    for p in group.params:
        for param in p.registered():
            if _has_grad_dtype(param) and param.grad_dtype != group.gradient_dtype:
                raise UnsupportedParameterError(
                    f"grad_dtype of parameter {p.name} was set after fully_shard",
                    expected=str(group.gradient_dtype),
                    got=str(param.grad_dtype),
                    where=f"parameter {p.name}",
                    fix="set it before fully_shard, or pass gradient_policy",
                )
