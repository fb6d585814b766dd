"""The whole parameters of a group: objects that stay, over memory that comes and goes.

A whole parameter is one tensor object for the life of the model: resharding frees its storage and unsharding
fills it again, so what autograd saved in forward is valid in backward. The objects are detached from the flat
buffer's version counter, therefore a refill does not look like an in-place change to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardgrad import ops
from shardgrad.engine.buffers import Chunks, RecurringBuffer
from shardgrad.engine.message_tag import Label
from shardgrad.engine.param import ManagedParam, mark_whole
from shardgrad.engine.streams import Stream, Streams
from shardgrad.sharding.byte_params import from_bytes, is_carried, unpack_bytes
from shardgrad.sharding.layout import Piece, ShardLayout
from shardgrad.sharding.strided_pack import unpack_crosswise
from shardgrad.sharding.zero_copy import DirectGather

__all__ = ["UnshardedParams"]


class UnshardedParams:
    """One flat buffer and, over it, the unsharded face of each parameter, which this makes.

    Args:
        params: in order; theirs is the dtype of the faces.
        layout: where each is in the buffer, and in the shard.
        shard: this rank's.
        dtype: of the buffer; bytes if the parameters are only carried.
        device: of compute.
        streams: of the root.

    Attributes:
        direct: the gathers of the layout's direct parameters, from this rank's shard into the buffer.
    """

    def __init__(
        self,
        params: Sequence[ManagedParam],
        layout: ShardLayout,
        shard: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        streams: Streams,
    ) -> None:
        self._buffer = RecurringBuffer(layout.unsharded_numel, dtype, device, streams)
        self._streams = streams
        self._ready = streams.mark()
        self._unpack = unpack_bytes if is_carried(params[0].sharded.dtype) else ops.unpack
        # Made for training even if the first forward is an evaluation in inference mode.
        with torch.inference_mode(mode=False):
            for p, view in zip(params, layout.unsharded_views(self._buffer.tensor), strict=True):
                # `.data` gives the view a version counter of its own.
                whole = p.cut.unsharded_face(from_bytes(view, p.sharded.dtype).data)
                p.unsharded = nn.Parameter(whole, requires_grad=p.sharded.requires_grad)
                mark_whole(p)
            self.direct = tuple(
                self._gather_of(params[i].name, layout.pieces[i], shard) for i in layout.direct
            )

    def _gather_of(self, name: str, piece: Piece, shard: torch.Tensor) -> DirectGather:
        whole = self._buffer.tensor.narrow(0, piece.unsharded_offset, piece.numel)
        return DirectGather(
            shard.narrow(0, piece.shard_offset, piece.shard_numel),
            Chunks(whole, whole.split(piece.shard_numel)),
            Label.unseen(f"all-gather of {name}"),
        )

    def lend(self, stream: Stream) -> None:
        """Brings the memory back, for `stream` to write into the places of direct parameters.

        Streams: it is allocated for the current one, which `stream` waits for.
        """
        self._buffer.allocate()
        self._ready.record(self._streams.current())
        self._ready.wait(stream)

    def fill(self, chunks: Sequence[torch.Tensor], layout: ShardLayout) -> None:
        """Puts the parameters together from the chunks of all ranks.

        Args:
            chunks: in rank order.
            layout: of the chunks, of which there may be fewer, and which may lack direct parameters that are
                there already; places in the buffer do not depend on it.

        Streams: on the current one, which the memory is allocated for.
        """
        self._buffer.allocate()
        self._unpack(chunks, self._buffer.tensor, layout.table)
        if layout.crosswise:
            unpack_crosswise(chunks, self._buffer.tensor, layout)

    def free(self) -> None:
        """Gives the memory back, after the last use on the current stream."""
        self._buffer.free()

    def storages(self) -> Sequence[torch.UntypedStorage]:
        """Returns what it is in; empty while it is gone."""
        return self._buffer.storages()
