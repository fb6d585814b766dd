"""Where shards live between steps: on the mesh's device, or on the host.

[Note: Shards on the host]
Under `CPUOffloadPolicy` parameter shards, gradient shards and optimizer states are host memory. The
device sees them only on their way: a shard is copied to it before its all-gather, on the gather
stream, and a reduced gradient is copied back, on the reduce stream. Arithmetic on gradients stays
on the device: where one has to be added to, it travels there and back, so that the host does not
wait in the middle of a backward.

Streams order what devices do, and nothing else. So the host itself waits, once, for the last copy
that reads or writes its memory before the program gets to it: at the end of a forward and of a
backward, and before a hook or the engine looks at a gradient.

On a CPU mesh the host is the device: nothing is copied and nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardgrad.errors import ForeignParameterError
from shardgrad.policies import SleepPolicy

__all__ = ["ShardMemory"]


@dataclass(frozen=True)
class ShardMemory:
    """Where shards, gradients and optimizer states live.

    Attributes:
        device: the offload device, or the one that computes.
        is_offloaded: True if computation and collectives happen on another device.
        pinned: the memory can be copied from and to that device while the host goes on.
        is_virtual: it can be given back and taken again at the same address.
    """

    device: torch.device
    is_offloaded: bool = False
    pinned: bool = False
    is_virtual: bool = False

    @classmethod
    def of(cls, device: torch.device, policy: OffloadPolicy | None) -> ShardMemory:
        """Returns the memory that a policy asks for.

        Args:
            device: where parameters compute.
            policy: torch's `CPUOffloadPolicy` or its base class, a `SleepPolicy`, or None.
        """
        if isinstance(policy, SleepPolicy):
            return cls(device, is_virtual=True)
        if not isinstance(policy, CPUOffloadPolicy):
            return cls(device)
        is_offloaded = device.type not in ("cpu", "meta")
        return cls(torch.device("cpu"), is_offloaded, is_offloaded and policy.pin_memory)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a zeroed 1-D tensor."""
        if self.is_virtual:
            from shardgrad.ops.virtual_memory import virtual_zeros  # which few programs need

            return virtual_zeros(numel, dtype, self.device)
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def require_params_here(
        self, params: Sequence[tuple[str, torch.Tensor]], *, where: str
    ) -> None:
        """Refuses offloaded parameters that a program has put on a device.

        Args:
            params: with their names.
            where: the unit, for the error.

        Raises:
            ForeignParameterError: naming them.
        """
        elsewhere = [name for name, param in params if param.device.type != self.device.type]
        if self.is_offloaded and elsewhere:
            raise ForeignParameterError(
                "FSDP parameters should be materialized on CPU when enabling CPU offloading",
                expected=f"parameters on {self.device}",
                got=f"{elsewhere} on {params[0][1].device}",
                where=where,
                fix='model.to_empty(device="cpu"), or load a state dict of CPU tensors',
            )
