"""All-gathers: what this rank sends (`AllGatherInput`, made once), and one under way (`AllGather`).

Special inputs, such as a shard on the host, are subclasses under `features/`, chosen in
`fully_shard.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Chunks, Slot
from shardgrad.engine.comm_context import CollectiveConfig, CommContext
from shardgrad.engine.spans import NO_SPAN, profiler, span
from shardgrad.engine.streams import Stream, StreamEvent
from shardgrad.engine.transports import MessageTag
from shardgrad.engine.unsharded import ZeroCopyGather
from shardgrad.sharding.layout import ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["AllGather", "AllGatherInput"]


class AllGatherInput:
    """What this rank sends in the all-gathers of a group: its shard.

    Attributes:
        chunk: 1-D, this rank's, with room for the tag at its end; it travels in `dtype`.
        process_group: the ranks that gather; by default those of the mesh.
        transport, ring: what the message goes through, and where it is staged.
        staging_nbytes: bytes of the slot that an all-gather needs.
        ready: recorded where `chunk` was last filled; None if the program or an optimizer does
            that.
        supports_zero_copy: True if parameters may be gathered from `chunk`, where they live, by
            themselves.
        is_local: True if the chunk is all that there is, so that nothing has to be gathered.
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
        # True if what is sent is a cast copy; where nothing is sent, the copy-out casts.
        self._is_cast = chunk.dtype != dtype and self.transport.sends
        gathered_nbytes = self.transport.gather_chunks * chunk.numel() * dtype.itemsize
        self.staging_nbytes = gathered_nbytes + self._extra_nbytes()
        self.ready: StreamEvent | None = None
        self.is_local = self.supports_zero_copy and not self.transport.sends

    def _extra_nbytes(self) -> int:
        """Returns the staging that `stage` needs besides the transport's."""
        return self.chunk.numel() * self.dtype.itemsize if self._is_staged_apart else 0

    @property
    def _is_staged_apart(self) -> bool:
        """True if what is sent is a copy that must not lie in the transport's staging."""
        return self._is_cast and not self.transport.gathers_in_place

    def refresh(self, name: str, version: object) -> None:
        """Brings the chunk of the unit `name` up to date with a version of the parameters."""

    def stage(self, slot: Slot, staging: Chunks) -> torch.Tensor:
        """Returns the chunk, or a copy of it in `dtype`. Streams: the copy is made on the current
        one.
        """
        if not self._is_cast:
            return self.chunk
        return self._room(slot, staging).copy_(self.chunk, non_blocking=True)

    def _room(self, slot: Slot, staging: Chunks) -> torch.Tensor:
        """Returns where a copy of the chunk goes."""
        if not self._is_staged_apart:
            return staging.parts[self.transport.rank]
        return slot.take(self.dtype, 1, self.chunk.numel()).whole

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
            span("all_gather", name) if profiler._is_profiler_enabled else NO_SPAN,
            comm_ctx.streams.on(stream),
        ):
            # The optimizer has written the shards on the stream that forward was called on.
            comm_ctx.parameters_ready.wait(stream)
            if source.ready is not None:
                source.ready.wait(stream)
            slot = self._slot = source.ring.acquire(source.staging_nbytes)
            slot.holder = self
            slot.start_writing(stream)
            staging = slot.take(source.dtype, transport.gather_chunks, source.chunk.numel())
            self._staging = staging
            messages = [(source.stage(slot, staging), staging, source.tag)]
            if zero_copy is not None:
                messages += zero_copy.messages(transport)
            with transport.together(messages):
                self._works = [transport.all_gather(*each) for each in messages]
            slot.finish_writing(stream)

    def wait(self, stream: Stream) -> list[torch.Tensor]:
        """Ends the collective; returns the chunks of all ranks in order, for `stream` to read until
        `release`: side by side in one tensor, if the transport brought all of them.

        Raises:
            CollectiveError: it failed.
        """
        chunks, *_ = [work.wait() for work in self._works]
        self._works = []
        self._slot.start_reading(stream)
        staging = self._staging
        return [staging.whole] if len(staging.parts) == len(chunks) else chunks

    def release(self, stream: Stream) -> None:
        """Says that what `stream` has been given so far is the last to read the chunks."""
        self._slot.release(stream)
        if self._works or not self.source.ring.keeps:
            # If it failed, some may be on their way.
            self._slot.give_back(is_written=bool(self._works))


class LocalAllGather(AllGather):
    """Nothing is launched or staged where there is one rank: its parameters are read where they
    live.
    """

    def __init__(self, source: AllGatherInput) -> None:
        self.source, self.streams, self.is_zero_copy = source, source.comm_ctx.streams, False

    def wait(self, stream: Stream) -> list[torch.Tensor]:
        """See `AllGather`."""
        self.source.comm_ctx.parameters_ready.wait(stream)
        return [self.source.chunk]

    def release(self, stream: Stream) -> None:
        """See `AllGather`."""
