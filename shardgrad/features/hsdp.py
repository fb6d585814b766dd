"""HSDP: what follows the reduce-scatter on a mesh of replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Chunks
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.transports import MessageTag, Work

__all__ = ["ReplicaAllReduce"]


class ReplicaAllReduce:
    """HSDP's second step: an all-reduce over the replicas."""

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        self._replicas = replicas

    def room(self, comm_ctx: CommContext, chunk_numel: int) -> tuple[int, int]:
        """See `SecondStep`: it works in place."""
        return 0, 0

    def arrange(
        self, rows: list[torch.Tensor], table: torch.Tensor, chunk_numel: int
    ) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """See `SecondStep`: the order stays."""
        return rows, table, chunk_numel

    def launch(
        self, summed: torch.Tensor, room: Chunks, tag: MessageTag, comm_ctx: CommContext
    ) -> Work:
        """See `SecondStep`."""
        what = tag.what.replace("reduce-scatter", "all-reduce")
        return comm_ctx.transport(self._replicas).all_reduce(summed, what=what)

    def result(self, summed: torch.Tensor) -> torch.Tensor:
        """See `SecondStep`: all of it."""
        return summed
