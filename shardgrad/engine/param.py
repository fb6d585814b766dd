"""One parameter: its sharded and its unsharded `nn.Parameter`, and the modules that register
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.sharding.dtensor import in_own_storage
from shardgrad.sharding.param_sharding import ParamSharding

__all__ = [
    "CLAIM",
    "IGNORED",
    "FSDPParam",
    "Owner",
    "fsdp_param_of",
    "is_extension",
    "is_replaced",
    "is_sharded_by_us",
    "is_unsharded_param",
    "local_of",
    "managed_by",
    "mark_post_forward",
    "mark_sharded",
    "mark_unsharded",
    "replaced_by",
]

# Set on an original parameter once a unit has taken it, for those who still register the original.
CLAIM = "_shardgrad_claim"

# Set on a module, with the names of those of its parameters that `ignored_params` had; or on a
# parameter of a module around.
IGNORED = "_shardgrad_ignored"

_SHARDED = "_shardgrad_sharded"
_UNSHARDED = "_shardgrad_unsharded"

# By the parameter's id, and not on the parameter: what is in its `__dict__` is saved along with it.
# Nor by a weak reference to it, which would forbid `torch.utils.swap_tensors`, and with it
# `module.to()`.
_managed: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()
# The same for what modules show between forward and backward.
_shown: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()

Owner = tuple[nn.Module, str]


@dataclass(eq=False)
class FSDPParam:
    """One parameter. Which group it travels in: `group_of` in `param_group.py`.

    Attributes:
        name: fully qualified from the root, or from its unit until a root is known.
        owners: every (module, attribute) that registers it; several if it is tied.
        shape: of the unsharded parameter.
        sharded: the DTensor that the optimizer sees; the original, until its group has sharded it.
        unsharded: the tensor that compute sees; made at the first unshard.
        post_forward: the DTensor over neighbouring ranks, if the group reshards to fewer.
        expected_local: local tensor of `sharded` as the engine left it; a view of the shard if
            its group is flat.
    """

    name: str
    owners: list[Owner]
    shape: tuple[int, ...]
    sharded: nn.Parameter
    sharding: ParamSharding
    unsharded: nn.Parameter | None = None
    post_forward: nn.Parameter | None = None
    expected_local: torch.Tensor | None = field(default=None, repr=False)

    def alias(self, local: torch.Tensor) -> None:
        """Makes `local`, a view of the shard, the local tensor of `sharded`."""
        self.expected_local = in_own_storage(local)
        # DTensor has no call for this, and a new DTensor would be a parameter that no optimizer
        # knows.
        self.sharded._local_tensor = self.expected_local  # type: ignore[attr-defined]

    def registered(self) -> list[nn.Parameter]:
        """Returns what the owning modules register: `sharded`, unless a program has replaced it."""
        registered = (module._parameters.get(attribute) for module, attribute in self.owners)
        return [param for param in registered if param is not None]

    def register(self, param: nn.Parameter) -> None:
        """Makes `param` what the owning modules register."""
        for module, attribute in self.owners:
            module._parameters[attribute] = param

    def require_unsharded(self) -> nn.Parameter:
        """Returns `unsharded`, which exists once the group has been unsharded."""
        if self.unsharded is None:
            raise RuntimeError(f"{self.name} has never been unsharded")
        return self.unsharded


def mark_sharded(p: FSDPParam) -> None:
    """Notes on a sharded parameter that it is one, and files it under `managed_by`."""
    p.sharded.__dict__[_SHARDED] = True
    _managed[id(p.sharded)] = p


def mark_unsharded(param: nn.Parameter, p: FSDPParam) -> None:
    """Notes on an unsharded parameter that it is one, and files it under `fsdp_param_of`."""
    param.__dict__[_UNSHARDED] = True
    _shown[id(param)] = p


def mark_post_forward(p: FSDPParam) -> None:
    """Files a parameter over fewer ranks under `fsdp_param_of`."""
    _shown[id(p.post_forward)] = p


def managed_by(param: torch.Tensor) -> FSDPParam | None:
    """Returns what manages a parameter; None if it is not one of ours, or was replaced by
    another.
    """
    managed = _managed.get(id(param))
    return managed if managed is not None and managed.sharded is param else None


def fsdp_param_of(param: torch.Tensor) -> FSDPParam | None:
    """Returns what manages a parameter, in whichever state modules show it; None if it is not one
    of ours.
    """
    shown = _shown.get(id(param))
    is_shown = shown is not None and (shown.unsharded is param or shown.post_forward is param)
    return shown if is_shown else managed_by(param)


def replaced_by(params: Iterable[torch.Tensor]) -> list[FSDPParam]:
    """Returns what modules register one of these DTensors for, until its group takes that over."""
    new = {id(p) for p in params if isinstance(p, DTensor) and managed_by(p) is None}
    return [p for p in _managed.values() if new & set(map(id, p.registered()))] if new else []


def is_sharded_by_us(param: torch.Tensor) -> bool:
    """Returns whether a parameter is a sharded one, and not a plain tensor or another library's
    DTensor.
    """
    return _SHARDED in param.__dict__


def is_replaced(param: torch.Tensor) -> bool:
    """Returns whether `fully_shard` has put a sharded parameter in this one's place."""
    return CLAIM in param.__dict__


def is_unsharded_param(param: torch.Tensor) -> bool:
    """Returns whether a parameter is an unsharded one, whose memory is freed by a reshard."""
    return _UNSHARDED in param.__dict__


def is_extension(param: torch.Tensor) -> bool:
    """Returns whether a tensor has all-gather extensions; see `features/tensor_extensions.py`."""
    local = local_of(param) if isinstance(param, DTensor) else param
    return hasattr(local, "fsdp_pre_all_gather") or hasattr(local, "fsdp_post_all_gather")


def local_of(param: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local tensor itself, not a view of it."""
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]
    return local
