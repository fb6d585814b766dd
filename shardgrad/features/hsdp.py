"""HSDP: the all-reduce over replicas that follows the reduce-scatter."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Chunks
from shardgrad.engine.comm_context import CommContext, SecondStep
from shardgrad.engine.transports import MessageTag, Work


class ReplicaAllReduce(SecondStep):
    """HSDP's second step: an all-reduce over the replicas, in place and in the order of chunks."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        self._replicas = replicas

    def launch(
        self, summed: torch.Tensor, room: Chunks, tag: MessageTag, comm_ctx: CommContext
    ) -> Work:
        """See `SecondStep`."""
        own_tag = MessageTag(tag.what.replace("reduce-scatter", "all-reduce"))
        return comm_ctx.transport(self._replicas).all_reduce(summed, own_tag)
