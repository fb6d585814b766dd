"""All-gathers: what this rank sends (`AllGatherInput`, and `ZeroCopyGather` for large parameters;
made once), one under way (`AllGather`), and the parameters that come of it (`UnshardedParams`).

Special inputs, such as a shard on the host, are subclasses under `features/`, chosen in
`fully_shard.py`.

[Note: Unsharded parameters]
They are objects that stay, over memory that comes and goes. Resharding frees a tensor's storage and
unsharding fills it again, so what autograd saved in forward is valid in backward. They are detached
from the buffer's version counter: autograd sees no in-place change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardgrad import ops
from shardgrad.engine.buffers import Chunks, RecurringBuffer, Slot
from shardgrad.engine.comm_context import CollectiveConfig, CommContext
from shardgrad.engine.param import FSDPParam, mark_unsharded
from shardgrad.engine.spans import NOTHING, span
from shardgrad.engine.streams import Stream, StreamEvent, Streams
from shardgrad.engine.transports import MessageTag, Work
from shardgrad.ops.movement import unpack_rows
from shardgrad.sharding.layout import ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.shardable import from_bytes, travels_as_bytes
from shardgrad.sharding.zero_copy import own_places

__all__ = [
    "AllGather",
    "AllGatherInput",
    "UnshardedMemory",
    "UnshardedParams",
    "ZeroCopyGather",
]


class AllGatherInput:
    """What this rank sends in the all-gathers of a group: its shard.

    Attributes:
        chunk: 1-D, this rank's, with room for the tag at its end; it travels in `dtype`.
        process_group: the ranks that gather; by default those of the mesh.
        transport, ring: what the message goes through, and where it is staged.
        staged_chunks: chunks of the slot that an all-gather needs; 0 if the shard is read where it
            is.
        staging_nbytes: bytes of the slot.
        ready: recorded where `chunk` was last filled; None if the program or an optimizer does
            that.
        supports_zero_copy: True if parameters may be gathered from `chunk`, where they live, by
            themselves.
    """

    supports_zero_copy = True

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
        self.chunk = chunk
        self.dtype = dtype
        self.tag = tag
        self.comm_ctx = comm_ctx
        self.process_group = process_group or mesh.gather_group
        self.transport, self.ring = collectives.for_gather(comm_ctx, self.process_group)
        self.staged_chunks = self.transport.gather_chunks
        self.staging_nbytes = self.staged_chunks * chunk.numel() * dtype.itemsize
        self.ready: StreamEvent | None = None

    def refresh(self, name: str, version: object) -> None:
        """Brings the chunk of the unit `name` up to date with a version of the parameters."""

    def stage(self, slot: Slot, staging: Chunks) -> torch.Tensor:
        """Returns the chunk to send: a copy of the shard in `dtype`, in this rank's part of
        `staging`, or the shard itself, which the copy-out casts if nothing is sent.

        Streams: the copy is made on the current one.
        """
        # Cast on the way into staging, so that the wire carries the narrow dtype; without a cast
        # the shard is sent from where it is.
        if self.chunk.dtype == self.dtype or self.staged_chunks == 0:
            return self.chunk
        return staging.part(self.transport.rank).copy_(self.chunk, non_blocking=True)

    def table(self, layout: ShardLayout) -> torch.Tensor:
        """Returns the table with which `ops.unpack` reads what was gathered."""
        return layout.table

    def forget(self) -> None:
        """Forgets what is kept of the parameters between steps."""

    def wait_until_read(self) -> None:
        """Makes the host wait until its memory has been read, if the chunk lives there."""

    def memory(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yields what is kept besides the shard, with its owner."""
        return iter(())


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
        # Views are made here once: addresses of shard and unsharded memory do not change.
        pieces = [layout.pieces[i] for i in layout.zero_copy]
        self._sent = [shard.narrow(0, p.shard_offset, p.shard_numel) for p in pieces]
        whole = (unsharded.narrow(0, p.unsharded_offset, p.numel) for p in pieces)
        self._places = [Chunks(flat, layout.world_size) for flat in whole]

    def messages(self, rank: int) -> list[tuple[torch.Tensor, Chunks, MessageTag]]:
        """Returns what `rank` sends, where it is received (1-D, in rank order), and the tag of each
        parameter.

        Streams: on the current one, this rank's own pieces are first cast to their places.
        """
        sent = self._sent
        if self._shard.dtype != self._unsharded.dtype:
            if self._own_places is None:
                self._own_places = own_places(self._layout, rank)
            # This rank's own pieces are what it sends, so they are cast into place first.
            ops.unpack(
                self._shard,
                self._unsharded,
                self._own_places,
                chunk_numel=self._shard.numel(),
            )
            sent = [places.part(rank) for places in self._places]
        return list(zip(sent, self._places, self._tags, strict=True))


class AllGather:
    """An all-gather, launched when it is made; holds its slot until the chunks have been read.

    `finish` is called when another all-gather needs the slot; it has to `wait` and to `release`.
    Parameters in `zero_copy` are not in the chunks: they are gathered into memory that the gather
    stream may write.

    Streams: copies and collective go to the gather stream, after the parameters were last written.
    Capture: safe once slots have grown.
    """

    def __init__(
        self,
        source: AllGatherInput,
        name: str,
        finish: Callable[[], None],
        zero_copy: ZeroCopyGather | None = None,
    ) -> None:
        self.source = source
        self.complete = finish  # see `Holder`
        self.streams = source.comm_ctx.streams
        self.is_zero_copy = zero_copy is not None
        comm_ctx, transport = source.comm_ctx, source.transport
        stream = comm_ctx.streams.gather
        with (
            span("all_gather", name),
            comm_ctx.streams.on(stream),
        ):
            # The optimizer has written the shards on the stream that forward was called on.
            comm_ctx.parameters_ready.wait(stream)
            if source.ready is not None:
                source.ready.wait(stream)
            slot = self._slot = source.ring.acquire(source.staging_nbytes)
            slot.holder = self
            # The copy-out that read this slot last may still be at work on its stream.
            slot.start_writing(stream)
            [staging] = slot.take((source.dtype, source.staged_chunks, source.chunk.numel()))
            sent = source.stage(slot, staging)
            self._gathered = staging.whole if transport.gather_chunks else sent
            messages = [(sent, staging, source.tag)]
            if zero_copy is not None:
                messages += zero_copy.messages(transport.rank)
            self._works: list[Work] = []
            with NOTHING if zero_copy is None else transport.together(messages):
                # The large ones go to their places; under NCCL all of them are one launch.
                for each in messages:
                    self._works.append(transport.all_gather(*each))
            slot.finish_writing(stream)

    def wait(self, stream: Stream) -> torch.Tensor:
        """Ends the collective; returns the chunks of all ranks in order, side by side (1-D), for
        `stream` to read until `release`.

        Raises:
            CollectiveError: it failed.
        """
        for work in self._works:
            work.wait()
        self._works = []
        # The stream of the forward waits for the gather, and the host does not.
        self._slot.start_reading(stream)
        return self._gathered

    def release(self, stream: Stream) -> None:
        """Says that what `stream` has been given so far is the last to read the chunks."""
        self._slot.release(stream)
        if self._works or not self.source.ring.keeps:
            # If it failed, some may be on their way.
            self._slot.give_back(is_written=bool(self._works))


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
    """One flat buffer, and the unsharded tensor of each parameter over it, which this makes. See
    [Note: Unsharded parameters].

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
        # Made for training even if the first forward is an evaluation in inference mode.
        with torch.inference_mode(mode=False):
            for p, view in zip(params, layout.unsharded_views(self._flat), strict=True):
                # `.data` gives the view another version counter.
                unsharded = p.sharding.unsharded_tensor(from_bytes(view, p.sharded.dtype).data)
                # Made once: autograd graphs, hooks and the collector know these objects, whose
                # memory comes and goes.
                p.unsharded = nn.Parameter(unsharded, requires_grad=p.sharded.requires_grad)
                mark_unsharded(p.unsharded, p)
            names = [params[i].name for i in layout.zero_copy]
            self.zero_copy = ZeroCopyGather(names, layout, shard, self._flat) if names else None

    def fill(self, gathered: torch.Tensor, layout: ShardLayout, source: AllGatherInput) -> None:
        """Copies the parameters out of what was gathered from `source`: 1-D, the chunks of all
        ranks side by side.

        `layout` may leave out zero-copy parameters, which are there already.

        Streams: on the current one.
        """
        # As late as this, if nothing was gathered in place: while its chunks travel, the next unit
        # takes no memory here.
        self.buffers[0].allocate()
        table, chunk_numel = source.table(layout), source.chunk.numel()
        if self._travel_as_bytes:
            # Bytes are only carried, in rows, and there is nothing to cast.
            unpack_rows(gathered, self._flat, table.tolist(), chunk_numel)
        else:
            ops.unpack(gathered, self._flat, table, chunk_numel=chunk_numel)
        if layout.strided:
            from shardgrad.sharding.strided_pack import unpack_strided

            unpack_strided(gathered, self._flat, layout)
        self._filled.record(self._streams.current())
