"""The unsharded parameters of a group: objects that stay, over memory that comes and goes.

Resharding frees a tensor's storage and unsharding fills it again, so what autograd saved in forward
is valid in backward. They are detached from the buffer's version counter: autograd sees no in-place
change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardgrad import ops
from shardgrad.engine.buffers import Chunks, RecurringBuffer
from shardgrad.engine.param import FSDPParam, mark_unsharded
from shardgrad.engine.streams import Stream, Streams
from shardgrad.engine.transports import MessageTag, Transport
from shardgrad.ops.movement import unpack_rows
from shardgrad.sharding.byte_params import from_bytes, travels_as_bytes
from shardgrad.sharding.layout import ShardLayout, table_of_rank
from shardgrad.sharding.strided_pack import unpack_strided
from shardgrad.sharding.zero_copy import own_places

__all__ = ["UnshardedMemory", "UnshardedParams", "ZeroCopyGather"]


class ZeroCopyGather:
    """The all-gathers from a shard straight into the unsharded parameters; see
    `sharding/zero_copy.py`.
    """

    def __init__(
        self,
        names: Sequence[str],
        layout: ShardLayout,
        shard: torch.Tensor,
        unsharded: torch.Tensor,
    ) -> None:
        self._layout, self._shard, self._unsharded = layout, shard, unsharded
        self._own_places: torch.Tensor | None = None
        self._tags = [MessageTag(f"all-gather of {name}") for name in names]
        pieces = [layout.pieces[i] for i in layout.zero_copy]
        self._sent = [shard.narrow(0, p.shard_offset, p.shard_numel) for p in pieces]
        whole = (unsharded.narrow(0, p.unsharded_offset, p.numel) for p in pieces)
        self._places = [
            Chunks(flat, flat.split(p.shard_numel)) for p, flat in zip(pieces, whole, strict=True)
        ]

    def messages(self, transport: Transport) -> list[tuple[torch.Tensor, Chunks, MessageTag]]:
        """Returns what to send, where it is received (1-D, in rank order), and the tag of each
        parameter.

        Streams: on the current one, this rank's own pieces are first cast, or copied, to their
        places.
        """
        sent, rank = self._sent, transport.rank
        if self._shard.dtype != self._unsharded.dtype or transport.gather_chunks < transport.size:
            if self._own_places is None:
                self._own_places = own_places(self._layout, rank)
            ops.unpack(
                self._shard,
                self._unsharded,
                self._own_places,
                chunk_numel=self._shard.numel(),
            )
            sent = [places.parts[rank] for places in self._places]
        return list(zip(sent, map(transport.missing, self._places), self._tags, strict=True))


class UnshardedMemory:
    """Buffers that a group's unsharded parameters lie in, allocated and freed as one."""

    def __init__(self, buffers: Sequence[RecurringBuffer], streams: Streams) -> None:
        self.buffers = list(buffers)
        self._streams = streams
        self._allocated = streams.event()
        self._filled = streams.event()

    def allocate(self) -> None:
        """Brings the memory back, for the current stream."""
        for buffer in self.buffers:
            buffer.allocate()

    def allocate_for(self, stream: Stream) -> None:
        """Brings the memory back on the current stream, for `stream`, which waits for that, to
        write into.
        """
        self.allocate()
        self._allocated.record(self._streams.current())
        self._allocated.wait(stream)

    def filled(self) -> None:
        """Says that the current stream has written the parameters."""
        self._filled.record(self._streams.current())

    def wait(self) -> None:
        """Makes the current stream wait for the parameters, which another one may have written."""
        self._filled.wait(self._streams.current())

    def free(self) -> None:
        """Gives the memory back, after the last use on the current stream."""
        for buffer in self.buffers:
            buffer.free()


class UnshardedParams(UnshardedMemory):
    """One flat buffer, and the unsharded tensor of each parameter over it, which this makes.

    The buffer has `dtype`, bytes if the parameters travel as bytes; the tensors have the
    parameters' dtype. `zero_copy` has the all-gathers of zero-copy parameters; None if there are
    none.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        layout: ShardLayout,
        shard: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        streams: Streams,
    ) -> None:
        buffer = RecurringBuffer.empty(layout.unsharded_numel, dtype, device, streams)
        super().__init__([buffer], streams)
        self._flat = buffer.tensor
        self._travel_as_bytes = travels_as_bytes(params[0].sharded.dtype)
        self._by_rank: dict[torch.Tensor, list[torch.Tensor]] = {}
        # Made for training even if the first forward is an evaluation in inference mode.
        with torch.inference_mode(mode=False):
            for p, view in zip(params, layout.unsharded_views(self._flat), strict=True):
                # `.data` gives the view another version counter.
                unsharded = p.sharding.unsharded_tensor(from_bytes(view, p.sharded.dtype).data)
                p.unsharded = nn.Parameter(unsharded, requires_grad=p.sharded.requires_grad)
                mark_unsharded(p.unsharded, p)
            names = [params[i].name for i in layout.zero_copy]
            self.zero_copy = ZeroCopyGather(names, layout, shard, self._flat) if names else None

    def fill(
        self,
        gathered: Sequence[torch.Tensor],
        layout: ShardLayout,
        table: torch.Tensor,
        chunk_numel: int,
    ) -> None:
        """Copies the parameters out of what was gathered: chunks of `chunk_numel`, in one tensor
        or in one each.

        `layout` may leave out zero-copy parameters, which are there already; `table` says where
        those of it lie in the chunks.

        Streams: on the current one.
        """
        self.buffers[0].allocate()
        for chunks, rows in zip(gathered, self._tables(table, len(gathered)), strict=True):
            if self._travel_as_bytes:
                unpack_rows(chunks, self._flat, rows.tolist(), chunk_numel)
            else:
                ops.unpack(chunks, self._flat, rows, chunk_numel=chunk_numel)
        if layout.strided:
            unpack_strided(gathered, self._flat, layout)
        self._filled.record(self._streams.current())

    def _tables(self, table: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Returns the table for each of `count` tensors that were gathered."""
        if count == 1:
            return [table]
        if table not in self._by_rank:
            self._by_rank[table] = [table_of_rank(table, rank) for rank in range(count)]
        return self._by_rank[table]
