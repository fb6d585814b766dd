"""The parameters of a group between forward and backward, cut over fewer ranks than they are sharded over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .buffers import RecurringBuffer
from .labels import LABEL_NUMEL, Label
from .layout import ShardLayout
from .mesh import DataParallelMesh
from .streams import Streams

__all__ = ["PostForwardShard"]


class PostForwardShard:
    """This rank's chunk of a group, cut over a smaller mesh; its memory is there between `fill` and `free`.

    Args:
        shapes: of the whole parameters.
        dims: along which each is cut.
        mesh: the neighbouring ranks.
        alignment: of the parameters, in elements.
        dtype: of the whole parameters.
        label: of the gather that starts here.

    Attributes:
        layout: of the chunk.
        chunk: 1-D, ends in the label.
        views: each parameter's rows in the chunk.
        ready: where the chunk was last filled.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dims: Sequence[int],
        mesh: DataParallelMesh,
        streams: Streams,
        *,
        alignment: int,
        dtype: torch.dtype,
        label: Label,
    ) -> None:
        self.mesh = mesh
        self.layout = ShardLayout.of(
            shapes, mesh.shard_size, alignment=alignment, with_flags=False, dims=dims
        )
        self.label = label
        self._buffer = RecurringBuffer(self.layout.chunk_numel, dtype, mesh.device, streams)
        self._streams = streams
        self.chunk = self._buffer.tensor
        with torch.inference_mode(mode=False):
            self._digits = torch.tensor(label.digits, dtype=dtype).to(mesh.device)
            self.views = self.layout.local_views(self.chunk, mesh.shard_rank)
        self.ready = streams.mark()

    def fill(self, wholes: Sequence[torch.Tensor]) -> None:
        """Copies this rank's rows out of whole parameters.

        Streams: on the current one.
        """
        self._buffer.allocate()
        rank = self.mesh.shard_rank
        with torch.no_grad():
            for whole, view, piece in zip(wholes, self.views, self.layout.pieces, strict=True):
                view.copy_(piece.of(whole.detach(), rank))
            # Each time, since the memory is another; from the device, so that nobody waits.
            self.chunk.narrow(0, self.layout.chunk_numel - LABEL_NUMEL, LABEL_NUMEL).copy_(self._digits)
        self.ready.record(self._streams.current())

    def free(self) -> None:
        """Gives the memory back, after the last use on the current stream."""
        self._buffer.free()
