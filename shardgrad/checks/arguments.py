"""Refuses invalid arguments of `fully_shard`, and invalid combinations, that would otherwise fail
only in the first forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shardgrad.engine.param_group import is_extension
from shardgrad.errors import OptionError, OptionTypeError, UnsupportedParameterError, unsupported
from shardgrad.policies import GradientPolicy, ParamDtypes, SleepPolicy
from shardgrad.sharding.offload import ShardMemory
from shardgrad.sharding.param_sharding import ParamSharding
from shardgrad.sharding.shardable import DTYPES, travels_as_bytes
from shardgrad.sharding.zero_stage import Stage

# Fields of torch's policies; older torch does not have all of them.
_KNOWN = {
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
    "cast_forward_inputs",
    "param_dtype_override_fn",
}
_KNOWN |= {"pin_memory"}  # of CPUOffloadPolicy

_COLLECTIVES = 'comm="collectives"'


def refuse_wrong_types(
    mp_policy: Any, offload_policy: Any, gradient_policy: Any, ignored: Collection[Any], comm: Any
) -> None:
    """Checks the types of the policies, their dtypes, the elements of `ignored_params`, and `comm`.

    Raises:
        OptionError: `mp_policy` is not a policy, or `comm` not one of its values.
        UnsupportedError: the offload policy is unknown, or a policy's field from a later torch is
            not at its default.
        OptionTypeError: a dtype is not one that gradients can have, the gradient policy is not a
            policy, or an ignored parameter is not a tensor.
    """
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise OptionError(
            "mp_policy must be a MixedPrecisionPolicy",
            expected="torch.distributed.fsdp.MixedPrecisionPolicy",
            got=repr(mp_policy),
            fix="mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.float32)",
        )
    if type(offload_policy) not in (type(None), OffloadPolicy, CPUOffloadPolicy, SleepPolicy):
        raise unsupported(
            type(offload_policy).__name__,
            instead="offload_policy=CPUOffloadPolicy() or OffloadPolicy()",
        )
    for policy in (mp_policy, offload_policy or OffloadPolicy()):
        for each in fields(policy):
            value = getattr(policy, each.name)
            if each.name not in _KNOWN and value != each.default:
                raise unsupported(
                    f"{type(policy).__name__}({each.name}={value!r})",
                    instead=f"{each.name}={each.default!r}",
                )
    if not isinstance(gradient_policy, GradientPolicy):
        raise OptionTypeError(
            "gradient_policy must be a GradientPolicy",
            expected="shardgrad.GradientPolicy",
            got=repr(gradient_policy),
            fix="gradient_policy=shardgrad.GradientPolicy(dtype=torch.float32)",
        )
    for policy, names in (
        (mp_policy, ("param_dtype", "reduce_dtype", "output_dtype")),
        (gradient_policy, ("dtype", "wire_dtype")),
    ):
        for field in names:
            name, dtype = type(policy).__name__, getattr(policy, field)
            if dtype not in (None, *DTYPES):
                raise OptionTypeError(
                    f"{name}.{field} must be a torch.dtype that gradients can have",
                    expected=f"{', '.join(map(str, DTYPES))}, or None",
                    got=repr(dtype),
                    fix=f"{name}({field}=torch.bfloat16)",
                )
    odd = [each for each in ignored if not isinstance(each, torch.Tensor)]
    if odd:
        raise OptionTypeError(
            "ignored_params must contain parameters, not names",
            expected="set[nn.Parameter]",
            got=repr(odd[0]),
            fix="ignored_params=set(module.parameters()) of the modules to leave out",
        )
    if comm not in ("collectives", "symmetric_memory"):
        raise OptionError(
            f"comm={comm!r} does not exist",
            expected='"collectives" or "symmetric_memory"',
            got=repr(comm),
            fix=_COLLECTIVES,
        )


def refuse_combinations(
    names: Mapping[nn.Parameter, str],
    shardings: Mapping[nn.Parameter, ParamSharding],
    dtypes: Mapping[nn.Parameter, ParamDtypes],
    reshard_after_forward: bool | int | None,
    stage: Stage,
    comm: str,
    memory: ShardMemory,
) -> None:
    """Refuses parameters and policies that another argument of the call does not support.

    Raises:
        UnsupportedError: the ZeRO stage or a reshard to fewer ranks does not support a parameter,
            or symmetric memory does not support it, or shards on the host.
        UnsupportedParameterError: a float8 parameter would be cast.
    """
    through_windows = comm == "symmetric_memory"
    if through_windows and memory.is_offloaded:
        raise unsupported(f"CPUOffloadPolicy with comm={comm!r}", instead=_COLLECTIVES)
    is_int = isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)
    for param, sharding in shardings.items():
        name = names[param]
        if through_windows and is_extension(param):
            raise unsupported(
                f"comm={comm!r} for {name}, which has fsdp_pre_all_gather", instead=_COLLECTIVES
            )
        if stage.over_both_axes and (sharding.dim or sharding.data_mesh.levels is None):
            what = f"dim {sharding.dim}" if sharding.dim else "a separate mesh"
            raise unsupported(
                f'zero_stage="hfsdp" for {name}, which is sharded on {what}',
                instead="zero_stage=3",
            )
        if is_int and sharding.came_as_dtensor:
            raise unsupported(
                f"reshard_after_forward as an int for {name}, which is a DTensor already",
                instead="reshard_after_forward=True or False",
            )
        dtype = dtypes[param].mp_policy.param_dtype
        is_cast = dtype not in (None, param.dtype)
        is_float8 = travels_as_bytes(param.dtype) and param.dtype.is_floating_point
        if is_float8 and is_cast and not is_extension(param):
            raise UnsupportedParameterError(
                f"parameter {name} is {param.dtype}, which is gathered as bytes and never cast",
                expected="mp_policy.param_dtype=None for units with float8 parameters",
                got=f"param_dtype={dtype}",
                where=f"parameter {name}",
                fix="put it in a separate unit without mp_policy, or pass it in ignored_params",
            )


def refuse_two_levels(names: Mapping[nn.Parameter, str], stage: Stage) -> None:
    """Refuses parameters that cannot be sharded over two levels: only plain ones can, whose rows
    are consecutive from rank to rank.

    Raises:
        UnsupportedError: there is another kind of parameter.
    """
    for param, name in names.items() if stage.over_both_axes else ():
        if is_extension(param) or isinstance(param, DTensor):
            what = "has fsdp_pre_all_gather" if is_extension(param) else "is a DTensor already"
            raise unsupported(
                f'zero_stage="hfsdp" for {name}, which {what}', instead="zero_stage=3"
            )
