"""The parameters of a group between forward and backward, cut over fewer ranks than they are sharded over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardgrad.engine.buffers import RecurringBuffer
from shardgrad.engine.message_tag import LABEL_NUMEL, Label
from shardgrad.engine.param import ManagedParam
from shardgrad.engine.streams import Streams
from shardgrad.sharding.layout import ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.param_sharding import cut_of

__all__ = ["PostForwardShard"]


class PostForwardShard:
    """This rank's chunk of a group, cut over a smaller mesh; its memory is there between `fill` and `free`.

    Args:
        params: in order; their faces over a former chunk are forgotten.
        mesh: the neighbouring ranks.
        alignment: of the parameters, in elements.
        dtype: of the whole parameters.
        label: of the gather that starts here.

    Attributes:
        layout: of the chunk.
        chunk: 1-D, ends in the label.
        ready: where the chunk was last filled.
    """

    def __init__(
        self,
        params: Sequence[ManagedParam],
        mesh: DataParallelMesh,
        streams: Streams,
        *,
        alignment: int,
        dtype: torch.dtype,
        label: Label,
    ) -> None:
        self.mesh = mesh
        self._params = params
        self.layout = ShardLayout.of(
            [p.cut.shape for p in params],
            mesh.shard_size,
            alignment=alignment,
            with_flags=False,
            dims=[p.cut.dim for p in params],
        )
        self.label = label
        self._buffer = RecurringBuffer(self.layout.chunk_numel, dtype, mesh.device, streams)
        self._streams = streams
        self.chunk = self._buffer.tensor
        with torch.inference_mode(mode=False):
            self._digits = torch.tensor(label.digits, dtype=dtype).to(mesh.device)
            self._views = self.layout.local_views(self.chunk, mesh.shard_rank)
        for p in params:
            p.post_forward = None
        self.ready = streams.mark()

    def fill(self) -> None:
        """Copies this rank's rows out of the whole parameters.

        Streams: on the current one.
        """
        self._buffer.allocate()
        rank = self.mesh.shard_rank
        with torch.no_grad():
            for p, view, piece in zip(self._params, self._views, self.layout.pieces, strict=True):
                view.copy_(piece.of(p.whole.detach(), rank))
            # Each time, since the memory is another; from the device, so that nobody waits.
            self.chunk.narrow(0, self.layout.chunk_numel - LABEL_NUMEL, LABEL_NUMEL).copy_(self._digits)
        self.ready.record(self._streams.current())

    def show(self) -> None:
        """Makes the parameters' faces over this chunk what their modules show."""
        for p, view in zip(self._params, self._views, strict=True):
            if p.post_forward is None:
                face = cut_of(p.whole, p.name, self.mesh, p.cut.dim).face(view)
                p.post_forward = nn.Parameter(face, requires_grad=p.sharded.requires_grad)
            p.register(p.post_forward)

    def free(self) -> None:
        """Gives the memory back, after the last use on the current stream."""
        self._buffer.free()
