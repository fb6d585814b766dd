"""Taking over parameters that a program replaced or moved.

`load_state_dict(assign=True)`, `model.to(...)`, `to_empty` and plain assignment put new tensors where the
shard's views were. A flat engine must not ignore them: what they hold is copied into the shard, and they
become its views.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter, getitem, is_
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.engine.param import ManagedParam, is_extension, local_of
from shardgrad.errors import ExtensionError, ForeignParameterError, MetaParameterError

if TYPE_CHECKING:
    from shardgrad.engine.param_group import ParamGroup

__all__ = ["Registration", "adopt", "require_data"]

_LOCAL = attrgetter("_local_tensor")


class Registration:
    """What modules register for sharded parameters, as the engine left it.

    That is, the same objects over the same memory, and no tensor extensions in flat groups. It is compared
    at every forward and every replay, for every parameter, so without a loop of Python's.

    Args:
        params: while they are sharded.
    """

    def __init__(self, params: Iterable[ManagedParam]) -> None:
        self._registers: list[dict[str, nn.Parameter | None]] = []
        self._attributes: list[str] = []
        self._faces: list[nn.Parameter] = []
        self._locals: list[torch.Tensor | None] = []
        self._pieces: list[torch.Tensor | None] = []  # of flat shards
        for p in params:
            if p.group.is_flat:
                self._pieces.append(p.expected_local)
            for module, attribute in p.owners:
                self._registers.append(module._parameters)
                self._attributes.append(attribute)
                self._faces.append(p.sharded)
                self._locals.append(p.expected_local)

    def holds(self) -> bool:
        """Returns whether modules register just these parameters, with their memory where it was."""
        registered = map(getitem, self._registers, self._attributes)
        return (
            all(map(is_, registered, self._faces))
            and all(map(is_, map(_LOCAL, self._faces), self._locals))
            and not any(map(hasattr, self._pieces, repeat("fsdp_pre_all_gather")))
        )


def adopt(group: ParamGroup) -> bool:
    """Takes over what a sharded group's modules register now; cheap when nothing changed.

    Called after `module._apply`, after `load_state_dict`, and before each outermost forward.

    Returns:
        True if anything was taken over. False also while part of the group is still on the meta device, and
        before a first forward that has to give tensor extensions a group of their own.

    Raises:
        ExtensionError: a parameter became a tensor extension after the first forward.
        ForeignParameterError: a replacement is not sharded the same way, or dtypes became mixed; nothing
            has been changed then.
    """
    if group.registration is not None and group.registration.holds():
        return False
    registration = Registration(group.params)
    if registration.holds():
        group.registration = registration
        return False
    shown = [_shown(p, group) for p in group.params]
    if group.is_flat and any(map(is_extension, shown)):
        _refuse_late_extensions(shown, group)
        return False
    if any(param.device.type == "meta" for param in shown):
        return False  # half-loaded; `require_data` names the rest if a forward comes too early
    _validate(shown, group)
    group.refill(shown, local_of(shown[0]).dtype)
    return True


def require_data(group: ParamGroup) -> None:
    """Refuses a group with parameters on the meta device.

    Raises:
        MetaParameterError: naming them.
    """
    names = [p.name for p in group.params if p.sharded.device.type == "meta"]
    if names:
        raise MetaParameterError(
            "FSDP parameters should be materialized from meta device before training, but the following "
            f"were still on meta device: {names}",
            expected=f"parameters on {group.home.device}",
            got=f"{len(names)} on meta",
            where=f"unit {group.name}",
            fix="model.to_empty(device=...) and initialise, or load_state_dict(..., assign=True)",
        )


def _shown(p: ManagedParam, group: ParamGroup) -> nn.Parameter:
    """Returns what the modules register now, checked to be sharded like the parameter."""
    registered = [module._parameters[attribute] for module, attribute in p.owners]
    # Of a tied parameter loaded twice, one of the new objects serves as well as the other.
    shown = next((param for param in registered if param is not p.sharded), p.sharded)
    face: object = shown
    placements = p.cut.placements
    if not (isinstance(face, DTensor) and tuple(face.shape) == p.shape and face.placements == placements):
        raise ForeignParameterError(
            f"parameter {p.name} was replaced by something its unit cannot take over",
            expected=f"nn.Parameter(DTensor) of shape {p.shape} with placements {placements}",
            got=f"{type(shown).__name__} of shape {None if shown is None else tuple(shown.shape)}",
            where=f"unit {group.name}",
            fix="torch.distributed.tensor.distribute_tensor(full, p.device_mesh, p.placements)",
        )
    return shown  # type: ignore[return-value]


def _refuse_late_extensions(shown: list[nn.Parameter], group: ParamGroup) -> None:
    if not group.is_in_use:
        return
    names = [p.name for p, param in zip(group.params, shown, strict=True) if is_extension(param)]
    raise ExtensionError(
        f"{', '.join(names)} got fsdp_pre_all_gather or fsdp_post_all_gather after the first forward",
        expected="both methods on the local tensor before the first forward of the root, or neither",
        got="a parameter that already travels in a flat shard",
        where=f"unit {group.name}",
        fix="put the methods there after to_empty() or loading, and before the model first runs",
    )


def _validate(shown: list[nn.Parameter], group: ParamGroup) -> None:
    elsewhere = [p.name for p, param in zip(group.params, shown, strict=True) if param.device.type != "cpu"]
    if group.home.is_away and elsewhere:
        raise ForeignParameterError(
            "FSDP parameters should be materialized on CPU when enabling CPU offloading",
            expected="parameters on cpu",
            got=f"{elsewhere} on {shown[0].device}",
            where=f"unit {group.name}",
            fix='model.to_empty(device="cpu"), or load a state dict of CPU tensors',
        )
    dtypes = {local_of(param).dtype for param in shown}
    if len(dtypes) > 1:
        raise ForeignParameterError(
            f"parameters of unit {group.name} no longer share a dtype",
            expected=f"one dtype for {[p.name for p in group.params]}",
            got=", ".join(map(str, sorted(dtypes, key=str))),
            fix="cast the whole unit at once, for example model.to(torch.bfloat16)",
        )
    for p, param, view in zip(group.params, shown, group.local_views(), strict=True):
        local = local_of(param)
        if local.shape != view.shape:
            raise ForeignParameterError(
                f"the local shard of {p.name} has another shape",
                expected=str(tuple(view.shape)),
                got=str(tuple(local.shape)),
                where=f"unit {group.name}",
                fix="distribute the full tensor with distribute_tensor",
            )
