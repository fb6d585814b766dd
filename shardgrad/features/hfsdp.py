"""Sharding over both axes of a mesh, with messages that go over one axis at a time (HFSDP).

[Note: Two levels]
Parameters, gradients and optimizer states are cut over all ranks of a 2-D mesh (*outer*: between machines,
*inner*: inside one), in the order of the ranks: with S inner ranks, rank (r, s) has chunk `r * S + s`. What
the outer ranks of one s hold together is an *inner shard*, as large as a shard of HSDP.

    all-gather:      outer once after each optimizer step, into the inner shard, which is kept;
                     inner in every forward and backward, from inner shards to whole parameters
    reduce-scatter:  inner, which leaves the sum of an inner shard; then outer, down to the chunk

So the outer axis, usually the slow one, carries 1/S of the parameters once a step and of the gradients once a
reduction, and optimizer states take as little as if all ranks were one group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardgrad.engine.all_gather import Gathering, Source
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.comm_context import Runtime
from shardgrad.engine.message_tag import LABEL_NUMEL, Label
from shardgrad.engine.streams import Stream
from shardgrad.engine.transports import Flight
from shardgrad.features.custom_comms import Comms
from shardgrad.sharding.mesh import TwoLevels

__all__ = ["InnerShard", "OuterScatter"]


def in_rank_order(inner_shards: Sequence[torch.Tensor], chunk_numel: int) -> list[torch.Tensor]:
    """Cuts the inner shards of all inner ranks into chunks, in the order of the ranks that own them."""
    by_inner = [shard.split(chunk_numel) for shard in inner_shards]
    return [chunk for same_outer in zip(*by_inner, strict=True) for chunk in same_outer]


class InnerShard:
    """What a rank gathers from over the inner axis: the chunks of its outer ranks, side by side.

    Args:
        levels: the mesh's two axes.
        chunk_numel: elements of one rank's chunk.
        dtype: of the inner shard.
        label: that the last chunk ends in.
        runtime: of the root.

    Attributes:
        source: where inner all-gathers start from.
        version: of the parameters it holds; None before the first `fill`.
    """

    def __init__(
        self, levels: TwoLevels, chunk_numel: int, dtype: torch.dtype, label: Label, runtime: Runtime
    ) -> None:
        self._levels = levels
        self._runtime = runtime
        with torch.inference_mode(mode=False):
            flat = torch.empty(levels.outer.size() * chunk_numel, dtype=dtype, device=runtime.device)
        self._filled = runtime.streams.mark()
        self._filled.record(runtime.streams.current())  # whoever had this memory before is here
        # The last chunk ends in the label, as all of them do.
        self.source = Source(flat, levels.inner, label, ready=self._filled)
        self.version: object = None

    def fill(self, chunk: Source, comms: Comms, name: str, version: object) -> None:
        """Gathers over the outer axis.

        Args:
            chunk: this rank's.
            comms: what carries the messages.
            name: of the unit, for traces.
            version: of the parameters.

        Streams: everything goes to the gather stream. Over gloo the host waits.
        Capture: safe once slots have grown.
        """
        gathering = Gathering(chunk, lambda: None)
        stream: Stream = self._runtime.streams.gather
        self._filled.wait(stream)
        gathering.launch(self._runtime, comms, self.source.chunk.dtype, name)
        with self._runtime.streams.on(stream), torch.no_grad():
            try:
                torch.cat(gathering.chunks(stream), out=self.source.chunk)
            finally:
                gathering.release(stream)
            self._filled.record(stream)
        self.version = version


class OuterScatter:
    """The second step of a reduction over two levels: from the inner shard's sum to this rank's chunk."""

    def __init__(self, levels: TwoLevels) -> None:
        self._levels = levels
        self._digits: dict[tuple[Label, torch.dtype], torch.Tensor] = {}
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def receive_chunks(self, runtime: Runtime) -> int:
        """Returns how many chunks of room `launch` needs."""
        return runtime.transport(self._levels.outer).receive_chunks

    def for_pack(
        self, grads: Sequence[torch.Tensor], table: torch.Tensor, chunk_numel: int
    ) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Returns what `ops.pack` is to be given, so that each inner shard is contiguous in the slot.

        A gradient is packed in as many parts as there are outer ranks: the part of one outer rank lies in
        consecutive chunks of all ranks, and comes to lie one in each inner shard.
        """
        outer, inner = self._levels.outer.size(), self._levels.inner.size()
        parts: list[torch.Tensor] = []
        rows = []
        for grad, (numel, shard_numel, *rest) in zip(grads, table.tolist(), strict=True):
            flat, step = grad.view(-1), inner * shard_numel
            span, offset, unsharded = rest
            for r in range(outer):
                length = min(max(numel - r * step, 0), step)
                parts.append(flat.narrow(0, r * step, length) if length and flat.numel() else flat[:0])
                rows.append((length, shard_numel, span, offset + r * chunk_numel, unsharded))
        if self._rows is None or self._rows[0] is not table:
            self._rows = table, torch.tensor(rows, dtype=torch.int64, device="cpu")
        return parts, self._rows[1], outer * chunk_numel

    def own_part(self, inner: torch.Tensor) -> torch.Tensor:
        """Returns this rank's chunk of an inner shard."""
        return inner.chunk(self._levels.outer.size())[self._levels.outer.rank()]

    def launch(self, inner: torch.Tensor, receive: Chunks, label: Label, runtime: Runtime) -> Flight:
        """Starts a reduce-scatter over the outer axis.

        Args:
            inner: the sum over inner ranks, 1-D, with a chunk for each outer rank; written.
            receive: room.
            label: of the message.
            runtime: of the root.

        Streams: the current one.
        Capture: safe after the first call.
        """
        size = self._levels.outer.size()
        digits = self._digits.get((label, inner.dtype))
        if digits is None:
            digits = torch.tensor(label.digits, dtype=inner.dtype).to(inner.device)
            self._digits[label, inner.dtype] = digits
        # The first step has added up the labels along with everything else.
        inner.view(size, -1)[:, -LABEL_NUMEL:].copy_(digits)
        return runtime.transport(self._levels.outer).reduce_scatter(
            Chunks(inner, inner.split(inner.numel() // size)), receive, label
        )
