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
from shardgrad.engine.all_gather import AllGatherInput, ZeroCopyGather
from shardgrad.engine.buffers import RecurringBuffer
from shardgrad.engine.param import FSDPParam, mark_unsharded
from shardgrad.engine.streams import Stream, Streams
from shardgrad.ops.movement import unpack_rows
from shardgrad.sharding.byte_params import from_bytes, travels_as_bytes
from shardgrad.sharding.layout import ShardLayout

__all__ = ["UnshardedMemory", "UnshardedParams"]


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
