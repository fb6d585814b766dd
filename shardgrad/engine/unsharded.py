"""The unsharded parameters of a group: objects that stay, over memory that comes and goes.

An unsharded parameter is one tensor object for the life of the model: resharding frees its storage and
unsharding fills it again, so what autograd saved in forward is valid in backward. The objects are detached
from the flat buffer's version counter, therefore a refill does not look like an in-place change to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardgrad import ops
from shardgrad.engine.buffers import Chunks, RecurringBuffer
from shardgrad.engine.param import FSDPParam, mark_unsharded
from shardgrad.engine.streams import Stream, Streams
from shardgrad.engine.transports import MessageTag
from shardgrad.sharding.byte_params import from_bytes, travels_as_bytes, unpack_bytes
from shardgrad.sharding.layout import Piece, ShardLayout
from shardgrad.sharding.strided_pack import unpack_strided

__all__ = ["UnshardedMemory", "UnshardedParams", "ZeroCopyGather"]


@dataclass(frozen=True)
class ZeroCopyGather:
    """One parameter's own all-gather. See [Note: Zero-copy parameters] in `sharding/zero_copy.py`.

    Attributes:
        piece: this rank's, 1-D, in its shard.
        places: where the pieces of all ranks belong: the unsharded parameter, 1-D, in rank order.
        tag: of the message, which has no room for one.
    """

    piece: torch.Tensor
    places: Chunks
    tag: MessageTag


class UnshardedMemory:
    """Buffers that a group's unsharded parameters lie in, allocated and freed as one.

    Args:
        buffers: with their storage.
        streams: of the root.
    """

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
        """Brings the memory back, for `stream` to write into.

        Streams: it is allocated for the current one, which `stream` waits for.
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

    Args:
        params: in order; theirs is the dtype of the tensors.
        layout: where each is in the buffer, and in the shard.
        shard: this rank's.
        dtype: of the buffer; bytes if the parameters travel as bytes.
        device: of compute.
        streams: of the root.

    Attributes:
        zero_copy: the all-gathers of the layout's zero-copy parameters, from this rank's shard into the
            buffer.
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
        self._unpack = unpack_bytes if travels_as_bytes(params[0].sharded.dtype) else None
        # Made for training even if the first forward is an evaluation in inference mode.
        with torch.inference_mode(mode=False):
            for p, view in zip(params, layout.unsharded_views(self._flat), strict=True):
                # `.data` gives the view another version counter.
                unsharded = p.sharding.unsharded_tensor(from_bytes(view, p.sharded.dtype).data)
                p.unsharded = nn.Parameter(unsharded, requires_grad=p.sharded.requires_grad)
                mark_unsharded(p.unsharded, p)
            self.zero_copy = tuple(
                self._gather_of(params[i].name, layout.pieces[i], shard) for i in layout.zero_copy
            )

    def _gather_of(self, name: str, piece: Piece, shard: torch.Tensor) -> ZeroCopyGather:
        unsharded = self._flat.narrow(0, piece.unsharded_offset, piece.numel)
        return ZeroCopyGather(
            shard.narrow(0, piece.shard_offset, piece.shard_numel),
            Chunks(unsharded, unsharded.split(piece.shard_numel)),
            MessageTag(f"all-gather of {name}"),
        )

    def fill(self, chunks: Sequence[torch.Tensor], layout: ShardLayout) -> None:
        """Copies the parameters out of the chunks of all ranks.

        Args:
            chunks: in rank order.
            layout: of the chunks, over as many ranks as there are, and perhaps without zero-copy parameters
                that are there already; places in the buffer do not depend on it.

        Streams: on the current one, which the memory is allocated for.
        """
        self.allocate()
        (self._unpack or ops.unpack)(chunks, self._flat, layout.table)
        if layout.strided:
            unpack_strided(chunks, self._flat, layout)
        self.filled()
