"""Adopting parameters that a program replaced or moved.

After `load_state_dict(assign=True)`, `model.to(...)`, `to_empty` or assignment, modules register
tensors that are not views of the shard. Their values are copied into the shard, and they become its
views.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.engine.param_group import (
    SHARDED,
    FSDPParam,
    ParamGroup,
    fsdp_param_of,
    is_extension,
    managed_by,
    replaced_by,
    writer_of,
)
from shardgrad.errors import (
    ExtensionError,
    ForeignParameterError,
    MetaParameterError,
    TiedParameterError,
    listed,
)
from shardgrad.sharding.dtensor import local_of


def adopt(group: ParamGroup) -> None:
    """Takes over the parameters that a sharded group's modules now register.

    Adopts nothing while a parameter is on the meta device.

    Raises:
        ExtensionError: a parameter of a flat shard was replaced by one with all-gather extensions.
        ForeignParameterError: a replacement is sharded differently, dtypes are mixed, or `data` was
            replaced. Nothing has changed.
        TiedParameterError: a replacement is the parameter of another place, which keeps it.
    """
    # While modules register unsharded parameters, they tell nothing about the sharded ones.
    if group.state is not SHARDED:
        return
    # `functional_call` returns the parameters that a forward has left registered, and a program may
    # pass them to it again. Register the sharded ones in their place.
    for p in group.params:
        for module, attribute in p.owners:
            if fsdp_param_of(module._parameters.get(attribute)) is p:
                writer_of(module)(attribute, p.sharded)
    if group.registration.holds():
        return
    _refuse_replaced_data(group)
    views = group.local_views()
    shown = [_shown(p, view.shape, group) for p, view in zip(group.params, views, strict=True)]
    refuse_late_extensions(group, shown)
    if any(param.device.type == "meta" for param in shown):
        return  # half loaded; `require_data` names the rest if a forward runs too early
    # Make all checks before copying the first value.
    _validate(shown, group)
    group.refill(shown, local_of(shown[0]).dtype)
    group.grads.params_replaced()


def adopt_given(params: Iterable[torch.Tensor]) -> None:
    """Adopts new parameters of an optimizer that a program has just put in place of sharded ones.

    The next forward would do the same. Raises as `adopt`.
    """
    for group in dict.fromkeys(p.group for p in replaced_by(params)):
        adopt(group)


def require_data(group: ParamGroup) -> None:
    """Raises `MetaParameterError` if parameters of the group are on the meta device."""
    names = [p.name for p in group.params if p.sharded.device.type == "meta"]
    if names:
        raise MetaParameterError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {names}",
            expected=f"parameters on {group.shard_memory.device}",
            got=f"{len(names)} on meta",
            where=group.where,
            fix="model.to_empty(device=...) and initialize, or load_state_dict(..., assign=True)",
        )


def refuse_late_extensions(group: ParamGroup, params: Iterable[nn.Parameter]) -> None:
    """Refuses parameters with all-gather extensions in a flat shard, which would not call them."""
    late = [p.name for p, param in zip(group.params, params, strict=True) if is_extension(param)]
    if group.is_flat and late:
        raise ExtensionError(
            f"{listed(late)} got fsdp_pre_all_gather or fsdp_post_all_gather after fully_shard",
            expected="parameters that have both methods before fully_shard, or never",
            got="methods on a parameter that is part of a flat shard",
            where=group.where,
            fix="give the parameters their tensor subclass before fully_shard, on the meta device "
            "if they are loaded later",
        )


def _refuse_replaced_data(group: ParamGroup) -> None:
    """Refuses `param.data = dtensor`, which does not change the values in the shard."""
    names = group.registration.with_other_data()
    if names:
        raise ForeignParameterError(
            f"assigning to the data of {listed(names)} does not change the values of a DTensor",
            expected="values that are changed in place",
            got="param.data = another DTensor",
            where=group.where,
            fix="with torch.no_grad(): param.copy_(new)",
        )


def _shown(p: FSDPParam, local_shape: torch.Size, group: ParamGroup) -> nn.Parameter:
    """Returns the parameter that modules now register; refuses one that is sharded differently."""
    registered = [module._parameters.get(attribute) for module, attribute in p.owners]
    # A tied parameter may have been loaded under one of its names only. If it was loaded under
    # several, either of the new objects will do.
    shown = next((param for param in registered if param is not p.sharded), p.sharded)
    _refuse_untied(p, group)
    param: object = shown
    placements = p.sharding.placements
    if isinstance(param, DTensor) and param.grad_fn is not None:
        raise ForeignParameterError(
            f"parameter {p.name} was replaced by the result of an operation, which would get no "
            "gradient",
            expected="nn.Parameter(DTensor), a leaf",
            got=f"a DTensor with {param.grad_fn.name()}",
            where=group.where,
            fix="detach() it to copy its values; to train its inputs, compute it in the module's "
            "forward",
        )
    if not (
        isinstance(param, DTensor)
        and param.shape == p.sharding.full_shape
        and param.placements == placements
        and local_of(param).shape == local_shape
    ):
        raise ForeignParameterError(
            f"parameter {p.name} was replaced by a tensor that its unit cannot adopt",
            expected=f"nn.Parameter(DTensor) of shape {tuple(p.sharding.full_shape)} with "
            f"placements {placements}, and {tuple(local_shape)} of it on this rank",
            got=f"{type(shown).__name__} of shape {None if shown is None else tuple(shown.shape)}",
            where=group.where,
            fix="torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements); "
            "or parametrize, or remove parameters, before fully_shard",
        )
    _refuse_late_tie(p, param, group)
    return shown  # type: ignore[return-value]


def kept_places(p: FSDPParam) -> list[bool]:
    """Returns, for each place that registers a parameter, whether it still has the sharded one."""
    return [module._parameters.get(name) is p.sharded for module, name in p.owners]


def _refuse_untied(p: FSDPParam, group: ParamGroup) -> None:
    """Refuses another parameter in some places of a tied one, which would tie it again."""
    kept = kept_places(p)
    if p.sharded.device.type != "meta" and any(kept) and not all(kept):
        raise TiedParameterError(
            f"the tied parameter {p.name} was replaced in {kept.count(False)} of its {len(kept)} "
            "places",
            expected="the same replacement in all places, which share one parameter",
            got="another parameter in some places",
            where=group.where,
            fix="untie the modules before fully_shard; or param.copy_(new), to change all places",
        )


def _refuse_late_tie(p: FSDPParam, shown: torch.Tensor, group: ParamGroup) -> None:
    """Refuses a parameter that another place registers too: each would bind its own gradient."""
    other = managed_by(shown)
    if other is None or other is p:
        return
    if any(fsdp_param_of(param) is other for param in other.registered()):
        raise TiedParameterError(
            f"parameter {p.name} was tied to {other.name} after fully_shard",
            expected="parameters that are tied before fully_shard",
            got="one parameter that replaces two",
            where=group.where,
            fix="tie the modules before the first fully_shard call that contains one of them",
        )


def _validate(shown: list[nn.Parameter], group: ParamGroup) -> None:
    home, named = group.shard_memory, zip(group.params, shown, strict=True)
    elsewhere = [p.name for p, param in named if param.device.type != home.device.type]
    if home.is_offloaded and elsewhere:
        raise ForeignParameterError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading",
            expected=f"parameters on {home.device}",
            got=f"{elsewhere} on {shown[0].device}",
            where=group.where,
            fix='model.to_empty(device="cpu"), or load a state dict of CPU tensors',
        )
    dtypes = {local_of(param).dtype for param in shown}
    if len(dtypes) > 1:
        raise ForeignParameterError(
            f"parameters of {group.where} no longer share a dtype",
            expected=f"one dtype for {[p.name for p in group.params]}",
            got=", ".join(map(str, sorted(dtypes, key=str))),
            fix="cast the whole unit at once, for example model.to(torch.bfloat16)",
        )
