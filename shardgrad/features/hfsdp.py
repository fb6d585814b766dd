"""Sharding over both axes of a mesh, with collectives over one axis at a time (HFSDP).

[Note: Two levels]
Parameters, gradients and optimizer states are sharded over all ranks of a 2-D mesh (*outer*:
between machines, *inner*: inside one), in the order of the ranks: with S inner ranks, rank (r, s)
has chunk `r * S + s`. What the outer ranks of one s hold together is an *inner shard*, as large as
a shard of HSDP.

    all-gather:      outer once after each optimizer step, into the inner shard, which is kept;
                     inner in every forward and backward, from inner shards to unsharded parameters
    reduce-scatter:  inner, which leaves the sum of an inner shard; then outer, down to the chunk

So the outer axis, usually the slow one, transfers 1/S of the parameters once per step and 1/S of
the gradients once per reduction. Optimizer states are as small as if all ranks were one group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar, cast

import torch

from shardgrad.engine.buffers import Chunks
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.param_group import AllGather
from shardgrad.engine.transports import MessageTag, Transport, Work
from shardgrad.features.offload import OffloadedGather
from shardgrad.sharding.mesh import TwoLevels


class HfsdpGather(AllGather):
    """The all-gather of a group over both axes. Its inner shard has the chunks of the outer ranks
    side by side.

    It is created with this rank's chunk, the input of the all-gather over the outer axis. `chunk`
    is then the inner shard.
    """

    _outer_gather: ClassVar[type[AllGather]] = AllGather

    def __post_init__(self) -> None:
        levels, comm_ctx, own = cast(TwoLevels, self.mesh.levels), self.comm_ctx, self.chunk.numel()
        outer = levels.outer
        self._own = self._outer_gather(
            self.chunk,
            self.layout,
            self.mesh,
            self.dtype,
            self.tag,
            comm_ctx,
            self.collectives,
            outer,
        )
        with torch.inference_mode(mode=False):
            self.chunk = torch.empty(outer.size() * own, dtype=self.dtype, device=comm_ctx.device)
        super().__post_init__()
        # The inner axis gathers inner shards, not chunks.
        self.table = _for_inner_shards(self.layout.table, own, levels)
        # This memory was allocated for the current stream, which may have used it before.
        self.streams.order(self.streams.current(), self.streams.gather)
        self._version: object = None

    def launch(self, name: str, version: object, finish: Callable[[], None]) -> None:
        """Gathers over the outer axis if the parameters have changed, then over the inner one.

        Streams: everything runs on the gather stream. Over gloo the host waits for the outer axis.
        Capture: safe once slots have grown.
        """
        if self._version != version:
            self._gather_outer(name, version)
        super().launch(name, version, finish)

    def _gather_outer(self, name: str, version: object) -> None:
        streams = self.streams
        self._own.launch(name, version, lambda: None)
        with streams.on(streams.gather), torch.no_grad():
            try:
                self.chunk.copy_(self._own.wait(streams.gather))
            finally:
                self._own.release(streams.gather)
        self._version = version


class OffloadedHfsdpGather(HfsdpGather):
    """`HfsdpGather` from shards on the host."""

    _outer_gather = OffloadedGather


def _for_inner_shards(table: torch.Tensor, chunk_numel: int, levels: TwoLevels) -> torch.Tensor:
    """Returns a table for chunks that are inner shards.

    Each parameter has as many rows as there are outer ranks: the part that one outer rank's inner
    ranks hold is contiguous in the parameter, and has one piece in each inner shard, behind the
    chunks of the outer ranks before.
    """
    rows = tuple(map(tuple, table.tolist()))
    return _inner_shard_table(rows, chunk_numel, levels.inner.size(), levels.outer.size())


# Shared by all units with the same layout: with thousands of outer ranks a table takes 0.5 MB.
@lru_cache(maxsize=256)
def _inner_shard_table(
    rows: tuple[tuple[int, ...], ...], chunk_numel: int, inner: int, outer: int
) -> torch.Tensor:
    parts = []
    for numel, shard_numel, span, offset, unsharded in rows:
        step = inner * shard_numel
        for r in range(outer):
            begin = min(r * step, numel)
            length = min(numel - begin, step)
            parts.append((length, shard_numel, span, offset + r * chunk_numel, unsharded + begin))
    with torch.inference_mode(mode=False):
        return torch.tensor(parts, dtype=torch.int64, device="cpu").reshape(-1, 5)


class OuterReduceScatter:
    """The second step of a reduction over two levels: from the inner shard's sum to this rank's
    chunk.
    """

    def __init__(self, levels: TwoLevels) -> None:
        self._levels = levels
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    def room(self, context: CommContext, chunk_numel: int) -> tuple[int, int]:
        """See `SecondStep`: what the transport receives into."""
        return self._transport(context).receive_chunks, chunk_numel

    def _transport(self, context: CommContext) -> Transport:
        return context.transport(self._levels.outer)

    def arrange(
        self, rows: list[torch.Tensor], table: torch.Tensor, chunk_numel: int
    ) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Returns the arguments of `ops.pack` that make each inner shard contiguous in the slot.

        A gradient is packed in as many parts as there are outer ranks. The part of one outer rank
        is spread over consecutive chunks, one of which goes to each inner shard.
        """
        outer, inner = self._levels.outer.size(), self._levels.inner.size()
        parts: list[torch.Tensor] = []
        for grad, (_, shard_numel, *_) in zip(rows, table.tolist(), strict=True):
            flat = grad.view(-1)
            cut = flat.split(inner * shard_numel) if flat.numel() else ()
            parts += [*cut, *[flat[:0]] * (outer - len(cut))]
        if self._places is None or self._places[0] is not table:
            self._places = table, _for_inner_shards(table, chunk_numel, self._levels)
        return parts, self._places[1], outer * chunk_numel

    def result(self, summed: torch.Tensor) -> torch.Tensor:
        """Returns this rank's chunk of an inner shard."""
        numel = summed.numel() // self._levels.outer.size()
        return summed.narrow(0, self._levels.outer.rank() * numel, numel)

    def launch(
        self, summed: torch.Tensor, room: Chunks, tag: MessageTag, context: CommContext
    ) -> Work:
        """Starts a reduce-scatter over the outer axis.

        Args:
            summed: the sum over inner ranks, 1-D, with a chunk for each outer rank; overwritten.
            room: the memory to receive into.
            tag: the tag of the message.
            context: the root's communication context.

        Streams: the current one.
        Capture: safe after the first call.
        """
        size = self._levels.outer.size()
        return self._transport(context).reduce_scatter(Chunks(summed, size), room, tag)
