"""The whole parameters of a group: objects that stay, over memory that comes and goes.

A whole parameter is one tensor object for the life of the model: resharding frees its storage and unsharding
fills it again, so what autograd saved in forward is valid in backward. The objects are detached from the flat
buffer's version counter, therefore a refill does not look like an in-place change to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from . import ops
from .buffers import RecurringBuffer
from .carried import from_bytes, is_carried, unpack_bytes
from .crosswise import unpack_crosswise
from .layout import ShardLayout
from .managed_param import ManagedParam, mark_whole
from .streams import Streams

__all__ = ["UnshardedParams"]


class UnshardedParams:
    """One flat buffer and, over it, the unsharded face of each parameter, which this makes.

    Args:
        params: in order; theirs is the dtype of the faces.
        layout: where each is in the buffer.
        dtype: of the buffer; bytes if the parameters are only carried.
        device: of compute.
        streams: of the root.
    """

    def __init__(
        self,
        params: Sequence[ManagedParam],
        layout: ShardLayout,
        dtype: torch.dtype,
        device: torch.device,
        streams: Streams,
    ) -> None:
        self._buffer = RecurringBuffer(layout.unsharded_numel, dtype, device, streams)
        self._unpack = unpack_bytes if is_carried(params[0].sharded.dtype) else ops.unpack
        # Made for training even if the first forward is an evaluation in inference mode.
        with torch.inference_mode(mode=False):
            for p, view in zip(params, layout.unsharded_views(self._buffer.tensor), strict=True):
                # `.data` gives the view a version counter of its own.
                whole = p.cut.unsharded_face(from_bytes(view, p.sharded.dtype).data)
                p.unsharded = nn.Parameter(whole, requires_grad=p.sharded.requires_grad)
                mark_whole(p)

    def fill(self, chunks: Sequence[torch.Tensor], layout: ShardLayout) -> None:
        """Puts the parameters together from the chunks of all ranks.

        Args:
            chunks: in rank order.
            layout: of the chunks, of which there may be fewer; places in the buffer do not depend on it.

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
