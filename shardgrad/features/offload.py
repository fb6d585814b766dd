"""All-gathers from shards on the host. See [Note: Shards on the host] in `sharding/offload.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardgrad.engine.all_gather import AllGatherInput
from shardgrad.engine.buffers import Chunks, Slot
from shardgrad.engine.comm_context import CollectiveConfig, CommContext
from shardgrad.engine.transports import MessageTag
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["OffloadedInput"]


class OffloadedInput(AllGatherInput):
    """A shard in host memory, copied to the device for each all-gather, and cast there."""

    supports_zero_copy = False

    def __init__(
        self,
        chunk: torch.Tensor,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        tag: MessageTag,
        comm_ctx: CommContext,
        collectives: CollectiveConfig,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(chunk, mesh, dtype, tag, comm_ctx, collectives, process_group)
        self._read = comm_ctx.streams.event()

    @property
    def _is_staged_apart(self) -> bool:
        return not self.transport.gathers_in_place

    def _extra_nbytes(self) -> int:
        landing = 0 if self.chunk.dtype == self.dtype else self.chunk.numel() * self.chunk.itemsize
        return super()._extra_nbytes() + landing

    def stage(self, slot: Slot, staging: Chunks) -> torch.Tensor:
        """See `AllGatherInput`."""
        room, chunk = self._room(slot, staging), self.chunk
        if chunk.dtype != self.dtype:
            landing = slot.take(chunk.dtype, 1, chunk.numel()).whole
            chunk = landing.copy_(chunk, non_blocking=True)
        sent = room.copy_(chunk, non_blocking=True)
        self._read.record(self.comm_ctx.streams.gather)
        return sent

    def wait_until_read(self) -> None:
        """See `AllGatherInput`."""
        self._read.wait_on_host()
