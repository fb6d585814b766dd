"""One parameter's faces, and who shows which."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

__all__ = ["ManagedParam", "Owner", "is_sharded_by_us", "local_of", "mark_sharded"]

_SHARDED = "_shardgrad_sharded"

Owner = tuple[nn.Module, str]


@dataclass(eq=False)
class ManagedParam:
    """One parameter: who registers it, and its faces.

    Attributes:
        name: fully qualified from the root, or from its unit until a root is known.
        owners: every (module, attribute) that registers it; several if it is tied.
        sharded: the DTensor the optimizer sees.
        unsharded: the tensor compute sees; made at the first unshard.
        post_forward: the DTensor over neighbouring ranks, if the group reshards to fewer.
    """

    name: str
    owners: list[Owner]
    shape: tuple[int, ...]
    sharded: nn.Parameter
    unsharded: nn.Parameter | None = None
    post_forward: nn.Parameter | None = None
    expected_local: torch.Tensor | None = field(default=None, repr=False)

    def alias(self, local: torch.Tensor) -> None:
        """Makes the sharded face show `local`, a view of the shard."""
        self.sharded._local_tensor = local  # type: ignore[attr-defined]
        self.expected_local = local

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


def mark_sharded(param: torch.Tensor) -> None:
    """Notes on a sharded parameter that it is ours."""
    param.__dict__[_SHARDED] = True


def is_sharded_by_us(param: torch.Tensor) -> bool:
    """Returns whether a parameter is a sharded face, and not a plain tensor or another library's DTensor."""
    return _SHARDED in param.__dict__


def local_of(param: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local tensor itself, not a view of it."""
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]
    return local
