"""One parameter: its sharded and unsharded `nn.Parameter`, and the modules that register them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.sharding.dtensor import in_own_storage, local_of
from shardgrad.sharding.param_sharding import ParamSharding

__all__ = [
    "CLAIM",
    "IGNORED",
    "FSDPParam",
    "Owner",
    "fsdp_param_of",
    "is_extension",
    "is_replaced",
    "is_unsharded_param",
    "local_of",
    "managed_by",
    "mark",
    "replaced_by",
    "unmark",
]

# Set on an original parameter once a unit has taken it, for modules that still register it.
CLAIM = "_shardgrad_claim"

# Set on the parameters that `ignored_params` contained, and on modules to the names of theirs.
IGNORED = "_shardgrad_ignored"

# Of parameters in every state. Keyed by the parameter's id instead of stored on the parameter,
# whose `__dict__` is saved along with it. A weak reference to the parameter would forbid
# `torch.utils.swap_tensors`, and so `module.to()`.
_known: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()

Owner = tuple[nn.Module, str]


@dataclass(eq=False)
class FSDPParam:
    """One parameter. `group_of` in `param_group.py` returns its group.

    Attributes:
        name: fully qualified from the root, or from its unit until a root is known.
        owners: every (module, attribute) that registers it; several if it is tied.
        sharded: the DTensor that the optimizer sees; the original parameter until it is sharded.
        unsharded: the tensor that compute sees; created at the first unshard.
        post_forward: the DTensor over neighbouring ranks, if the group reshards to fewer.
        expected_local: the local tensor of `sharded` as the engine left it; a view of the shard if
            its group is flat.
    """

    name: str
    owners: list[Owner]
    sharded: nn.Parameter
    sharding: ParamSharding
    unsharded: nn.Parameter | None = None
    post_forward: nn.Parameter | None = None
    expected_local: torch.Tensor | None = field(default=None, repr=False)

    def alias(self, local: torch.Tensor) -> None:
        """Makes `local`, a view of the shard, the local tensor of `sharded`."""
        self.expected_local = in_own_storage(local)
        # DTensor has no method for this, and the optimizer would not know a new DTensor.
        self.sharded._local_tensor = self.expected_local  # type: ignore[attr-defined]

    def registered(self) -> list[nn.Parameter]:
        """Returns the parameters that modules register: `sharded`, unless a program replaced it."""
        registered = (module._parameters.get(attribute) for module, attribute in self.owners)
        return [param for param in registered if param is not None]

    def register(self, param: nn.Parameter) -> None:
        """Makes the owning modules register `param`."""
        for module, attribute in self.owners:
            module._parameters[attribute] = param

    def require_unsharded(self) -> nn.Parameter:
        """Returns `unsharded`, which exists once the group has been unsharded."""
        if self.unsharded is None:
            raise RuntimeError(f"{self.name} has never been unsharded")
        return self.unsharded


def mark(param: nn.Parameter, p: FSDPParam) -> None:
    """Makes `fsdp_param_of` find `p` for its parameter in one of its states."""
    _known[id(param)] = p


def unmark(p: FSDPParam) -> None:
    """Makes `managed_by` return None for the parameter of `p`, which an outer unit takes."""
    del _known[id(p.sharded)]


def managed_by(param: torch.Tensor) -> FSDPParam | None:
    """Returns the `FSDPParam` of a sharded parameter; None if it is foreign or was replaced."""
    managed = fsdp_param_of(param)
    return managed if managed is not None and managed.sharded is param else None


def fsdp_param_of(param: torch.Tensor) -> FSDPParam | None:
    """Returns the `FSDPParam` of a parameter in any state; None if it is foreign."""
    p = _known.get(id(param))
    if p is None or all(param is not each for each in (p.sharded, p.unsharded, p.post_forward)):
        return None
    return p


def replaced_by(params: Iterable[torch.Tensor]) -> list[FSDPParam]:
    """Returns the parameters in whose place modules register one of these DTensors.

    Only until their group adopts the DTensor.
    """
    new = {id(p) for p in params if isinstance(p, DTensor) and managed_by(p) is None}
    return [p for p in _known.values() if new & set(map(id, p.registered()))] if new else []


def is_replaced(param: torch.Tensor) -> bool:
    """Returns whether `fully_shard` has replaced this parameter by a sharded one."""
    return CLAIM in param.__dict__


def is_unsharded_param(param: torch.Tensor) -> bool:
    """Returns whether a parameter is an unsharded one, whose memory a reshard frees."""
    p = fsdp_param_of(param)
    return p is not None and p.sharded is not param


def is_extension(param: torch.Tensor) -> bool:
    """Returns whether a tensor has all-gather extensions; see `features/tensor_extensions.py`."""
    local = local_of(param)
    return hasattr(local, "fsdp_pre_all_gather") or hasattr(local, "fsdp_post_all_gather")
