"""One parameter's faces, and who shows which."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgrad.sharding.dtensor import in_own_storage

if TYPE_CHECKING:
    from shardgrad.engine.param_group import ParamGroup
    from shardgrad.sharding.param_sharding import Cut

__all__ = [
    "CLAIM",
    "ManagedParam",
    "Owner",
    "Snapshot",
    "is_extension",
    "is_replaced",
    "is_sharded_by_us",
    "is_whole",
    "local_of",
    "managed_by",
    "mark_sharded",
    "mark_whole",
]

# Set on an original parameter once a unit has taken it, for those who still register the original.
CLAIM = "_shardgrad_claim"

_SHARDED = "_shardgrad_sharded"
_WHOLE = "_shardgrad_whole"

# By the parameter's id, and not on the parameter: what is in its `__dict__` is saved along with it. Nor by a
# weak reference to it, which would forbid `torch.utils.swap_tensors`, and with it `module.to()`.
_managed: weakref.WeakValueDictionary[int, ManagedParam] = weakref.WeakValueDictionary()

Owner = tuple[nn.Module, str]

# What identifies a tensor's storage. A DTensor's holds no data, but it is replaced along with it.
_storage_of: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
_LOCAL = attrgetter("_local_tensor")


@dataclass(eq=False)
class ManagedParam:
    """One parameter: who registers it, and its faces.

    Attributes:
        name: fully qualified from the root, or from its unit until a root is known.
        owners: every (module, attribute) that registers it; several if it is tied.
        shape: of the whole.
        sharded: the DTensor the optimizer sees.
        cut: how the one becomes the other.
        unsharded: the tensor compute sees; made at the first unshard.
        post_forward: the DTensor over neighbouring ranks, if the group reshards to fewer.
        group: the group it travels in.
        expected_local: the local tensor of the sharded face, as the engine left it.
    """

    name: str
    owners: list[Owner]
    shape: tuple[int, ...]
    sharded: nn.Parameter
    cut: Cut
    unsharded: nn.Parameter | None = None
    post_forward: nn.Parameter | None = None
    expected_local: torch.Tensor | None = field(default=None, repr=False)
    group: ParamGroup = field(init=False, repr=False)

    def alias(self, local: torch.Tensor) -> None:
        """Makes the sharded face show `local`, a view of the shard."""
        self.expected_local = in_own_storage(local)
        self.sharded._local_tensor = self.expected_local  # type: ignore[attr-defined]

    def registered(self) -> list[nn.Parameter]:
        """Returns what the owning modules show: `sharded`, unless a program has replaced it."""
        faces = (module._parameters[attribute] for module, attribute in self.owners)
        return [face for face in faces if face is not None]

    def register(self, face: nn.Parameter) -> None:
        """Makes `face` what the owning modules show."""
        for module, attribute in self.owners:
            module._parameters[attribute] = face

    @property
    def whole(self) -> nn.Parameter:
        """The unsharded face, which exists once the group has been unsharded."""
        if self.unsharded is None:
            raise RuntimeError(f"{self.name} has no unsharded face yet")
        return self.unsharded


class Snapshot:
    """What a program sees of some parameters, to be compared with later; a comparison is one pass in C.

    Args:
        params: sharded faces.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = list(params)
        self._locals = list(map(_LOCAL, self._params))
        self._storages = list(map(_storage_of, self._params))

    @property
    def still_holds(self) -> bool:
        """False if a local tensor or a storage was replaced; torch lets `param.data = x` pass in silence."""
        return (
            all(map(is_, map(_LOCAL, self._params), self._locals))
            and list(map(_storage_of, self._params)) == self._storages
        )


def mark_sharded(managed: ManagedParam) -> None:
    """Notes on a sharded parameter that it is ours, and whose it is."""
    managed.sharded.__dict__[_SHARDED] = True
    _managed[id(managed.sharded)] = managed


def mark_whole(managed: ManagedParam) -> None:
    """Notes on an unsharded face that it is one."""
    managed.whole.__dict__[_WHOLE] = True


def managed_by(param: torch.Tensor) -> ManagedParam | None:
    """Returns what manages a parameter, or None if it is not one of ours, or was replaced by another."""
    managed = _managed.get(id(param))
    return managed if managed is not None and managed.sharded is param else None


def is_sharded_by_us(param: torch.Tensor) -> bool:
    """Returns whether a parameter is a sharded face, and not a plain tensor or another library's DTensor."""
    return _SHARDED in param.__dict__


def is_replaced(param: torch.Tensor) -> bool:
    """Returns whether `fully_shard` has put a sharded parameter in this one's place."""
    return CLAIM in param.__dict__


def is_whole(param: torch.Tensor) -> bool:
    """Returns whether a parameter is an unsharded face, which comes and goes with its unit's forward."""
    return _WHOLE in param.__dict__


def is_extension(param: torch.Tensor) -> bool:
    """Returns whether a parameter, or the local tensor of one that is a DTensor, says itself what travels.

    What that means is in `features/tensor_extensions.py`.
    """
    local = local_of(param) if isinstance(param, DTensor) else param
    return hasattr(local, "fsdp_pre_all_gather") or hasattr(local, "fsdp_post_all_gather")


def local_of(param: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local tensor itself, not a view of it."""
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]
    return local
