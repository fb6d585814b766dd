"""Where shards live between steps: on the mesh's device or on the host.

[Note: Shards on the host]
Under `CPUOffloadPolicy`, parameter shards, gradient shards and optimizer states are in host memory.
A shard is copied to the device before its all-gather, on the gather stream. A reduced gradient is
copied back, on the reduce stream. Arithmetic on gradients stays on the device: a gradient that is
added to is copied there and back, so that the host does not wait during a backward.

Streams order only the work of devices. So the host itself waits for the last copy that reads or
writes its memory: at the end of a forward and of a backward, and before a hook or the engine reads
a gradient.

On a CPU mesh the host is the device: nothing is copied and nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardgrad.policies import SleepPolicy


@dataclass(frozen=True)
class ShardMemory:
    """Where shards, gradients and optimizer states live.

    Attributes:
        device: the offload device, or the device that computes.
        is_offloaded: True if computation and collectives run on another device.
        pinned: copies from and to that device are asynchronous.
        is_virtual: the memory can be released and allocated again at the same address.
    """

    device: torch.device
    is_offloaded: bool = False
    pinned: bool = False
    is_virtual: bool = False

    @classmethod
    def of(cls, device: torch.device, policy: OffloadPolicy | None) -> ShardMemory:
        """Returns the memory that a policy requires.

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
            from shardgrad.ops.virtual_memory import virtual_zeros  # few programs need it

            return virtual_zeros(numel, dtype, self.device)
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)
