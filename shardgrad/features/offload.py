"""All-gathers from shards on the host. See [Note: Shards on the host] in `sharding/offload.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Chunks
from shardgrad.engine.comm_context import CollectiveConfig, CommContext
from shardgrad.engine.param_group import AllGather
from shardgrad.engine.transports import MessageTag
from shardgrad.sharding.layout import ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["OffloadedGather"]


class OffloadedGather(AllGather):
    """A shard in host memory, copied to the device for each all-gather, and cast there."""

    supports_zero_copy = False

    def __init__(
        self,
        chunk: torch.Tensor,
        layout: ShardLayout,
        mesh: DataParallelMesh,
        dtype: torch.dtype,
        tag: MessageTag,
        comm_ctx: CommContext,
        collectives: CollectiveConfig,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(chunk, layout, mesh, dtype, tag, comm_ctx, collectives, process_group)
        # The staged chunk is on the device even if nothing is sent. If it is cast, a second piece
        # receives the shard in the dtype of the host.
        self.sizes = [
            (dtype, self.transport.gather_chunks or 1, chunk.numel()),
            (chunk.dtype, int(chunk.dtype != dtype), chunk.numel()),
        ]
        self._read = comm_ctx.streams.event()

    def stage(self, staging: Chunks, *landing: Chunks) -> torch.Tensor:
        """See `AllGather`. If the shard is cast, it is copied to a separate piece of memory
        first.
        """
        chunk = self.chunk
        if chunk.dtype != self.dtype:
            chunk = landing[0].whole.copy_(chunk, non_blocking=True)
        sent = staging.part(self.transport.rank).copy_(chunk, non_blocking=True)
        self._read.record(self.comm_ctx.streams.gather)
        return sent

    def wait_until_read(self) -> None:
        """See `AllGather`."""
        self._read.wait_on_host()
