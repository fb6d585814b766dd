"""All-gathers from shards on the host. See [Note: Shards on the host] in `sharding/offload.py`."""

from __future__ import annotations

import torch

from shardgrad.engine.buffers import Chunks
from shardgrad.engine.param_group import AllGather


class OffloadedGather(AllGather):
    """A shard in host memory, copied to the device for each all-gather, and cast there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        dtype, chunk = self.dtype, self.chunk
        # The staged chunk is on the device even if nothing is sent. If it is cast, a second piece
        # receives the shard in the dtype of the host.
        self.sizes = [
            (dtype, self.transport.size, chunk.numel()),
            (chunk.dtype, int(chunk.dtype != dtype), chunk.numel()),
        ]

    def stage(self, staging: Chunks, *landing: Chunks) -> torch.Tensor:
        """See `AllGather`. If the shard is cast, it is copied to a separate piece of memory
        first.
        """
        chunk = self.chunk
        if chunk.dtype != self.dtype:
            chunk = landing[0].whole.copy_(chunk, non_blocking=True)
        sent = staging.part(self.transport.rank).copy_(chunk, non_blocking=True)
        self.comm_ctx.shards_read.record(self.streams.gather)
        return sent
