"""Refusing arguments of `fully_shard` that Python would take and the first forward would stumble
over.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardgrad.errors import OptionTypeError
from shardgrad.policies import GradientPolicy

__all__ = ["refuse_wrong_types"]


def refuse_wrong_types(
    mp_policy: MixedPrecisionPolicy, gradient_policy: Any, ignored: Collection[Any]
) -> None:
    """Looks at the dtypes of a policy, and at what `ignored_params` holds.

    Raises:
        OptionTypeError: a dtype is no dtype, the gradient policy no policy, an ignored parameter no
            tensor.
    """
    if not isinstance(gradient_policy, GradientPolicy):
        raise OptionTypeError(
            "gradient_policy must be a GradientPolicy",
            expected="shardgrad.GradientPolicy",
            got=repr(gradient_policy),
            fix="gradient_policy=shardgrad.GradientPolicy(dtype=torch.float32)",
        )
    for policy, fields in (
        (mp_policy, ("param_dtype", "reduce_dtype", "output_dtype")),
        (gradient_policy, ("dtype", "wire_dtype")),
    ):
        for field in fields:
            name, dtype = type(policy).__name__, getattr(policy, field)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise OptionTypeError(
                    f"{name}.{field} must be a torch.dtype",
                    expected="a torch.dtype, or None",
                    got=repr(dtype),
                    fix=f"{name}({field}=torch.bfloat16)",
                )
    odd = [each for each in ignored if not isinstance(each, torch.Tensor)]
    if odd:
        raise OptionTypeError(
            "ignored_params must hold parameters, not their names",
            expected="set[nn.Parameter]",
            got=repr(odd[0]),
            fix="ignored_params=set(module.parameters()), of the modules to leave out",
        )
