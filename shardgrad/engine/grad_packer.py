"""Writing a group's gradients, as autograd has made them, into what is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardgrad import ops
from shardgrad.engine.buffers import Slot
from shardgrad.engine.grad_collector import GradCollector
from shardgrad.engine.message_tag import TAG_NUMEL
from shardgrad.engine.param import FSDPParam
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.streams import Streams
from shardgrad.features.hfsdp import OuterScatter
from shardgrad.sharding.layout import Piece, ShardLayout
from shardgrad.sharding.strided_pack import pack_strided

__all__ = ["GradPacker"]


class GradPacker:
    """Packs the gradients of one group.

    Args:
        group: the group.
        arrivals: where its gradients come in.
        outer: the second step over two levels, or None.
    """

    def __init__(self, group: ParamGroup, arrivals: GradCollector, outer: OuterScatter | None) -> None:
        self._group = group
        self._arrivals = arrivals
        self._outer = outer
        self._params: list[FSDPParam] = []
        self._layout: ShardLayout | None = None
        self.tails: dict[tuple[tuple[bool, ...], tuple[float, ...]], torch.Tensor] = {}

    @property
    def layout(self) -> ShardLayout:
        """Of the trainable parameters."""
        if self._layout is None:
            raise RuntimeError(f"unit {self._group.name} was never unsharded")
        return self._layout

    def start_over(self, params: Sequence[FSDPParam], layout: ShardLayout | None) -> None:
        """Takes these for the trainable parameters from now on."""
        self._params = list(params)
        self._layout = layout
        self.tails.clear()
        self._nothing = torch.empty(0, dtype=self._group.gather_dtype, device=self._group.mesh.device)

    def pack(
        self,
        slot: Slot,
        target: torch.Tensor,
        *,
        streams: Streams,
        directly: bool,
        divisor: float,
        accumulate: bool,
    ) -> list[torch.Tensor]:
        """Writes what has arrived, and the tail, into the chunks of all ranks.

        Args:
            slot: that the chunks are in.
            target: the chunks, 1-D.
            streams: of the root.
            directly: leave direct parameters out, and return their gradients.
            divisor: what gradients are divided by; 1 if `directly`.
            accumulate: add to what the chunks hold.

        Returns:
            The whole gradients of direct parameters, 1-D in the reduce dtype, zeros where none has arrived;
            to be read until the slot is released.

        Streams: the home stream, after the slot is free and after every producer; see `grad_collector.py`.
        """
        arrivals, layout = self._arrivals, self.layout
        slot.start_writing(arrivals.home)
        arrivals.wait_for_producers()
        with streams.on(arrivals.home), torch.no_grad():
            arrived = arrivals.gradients
            if self._group.holds_dtensors:
                arrived = [
                    None if grad is None else p.sharding.local_gradient(grad)
                    for p, grad in zip(self._params, arrived, strict=True)
                ]
            grads = [self._nothing if g is None else g.contiguous() for g in arrived]
            alone = [self._whole(grads[i], layout.pieces[i]) for i in layout.zero_copy] if directly else []
            if alone:
                grads = [grads[i] for i in layout.others]
                slot.lend(alone, arrivals.streams)
            self._fill(grads, target, layout.packed if directly else layout, divisor, accumulate=accumulate)
        slot.finish_writing(arrivals.home)
        return alone

    def _whole(self, grad: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Returns a gradient as it is sent."""
        if not grad.numel():
            return grad.new_zeros(piece.numel, dtype=self._group.reduce_dtype)
        return grad.to(self._group.reduce_dtype).view(-1)

    def _fill(
        self,
        grads: list[torch.Tensor],
        target: torch.Tensor,
        layout: ShardLayout,
        divisor: float,
        *,
        accumulate: bool,
    ) -> None:
        table, chunk_numel = layout.table_with_tail, layout.chunk_numel
        straight = [grads[i] for i in layout.straight] if layout.strided else grads
        straight = [*straight, self._tail(divisor, labelled=not accumulate)]
        if self._outer is not None:  # which takes no strided parameters
            straight, table, chunk_numel = self._outer.for_pack(straight, table, chunk_numel)
        if layout.strided:
            pack_strided(grads, target, layout, divisor=divisor, accumulate=accumulate)
        ops.pack(straight, target, table, chunk_numel=chunk_numel, divisor=divisor, accumulate=accumulate)

    def _tail(self, divisor: float, *, labelled: bool) -> torch.Tensor:
        """Returns this rank's flags and the label, once for each rank's chunk, in float32.

        See [Note: Touched flags] in `scheduler.py` and [Note: Labels]. A tail that is added to one that has
        the label already brings none.
        """
        label = self._group.reduce_tag.digits if labelled else (0.0,) * TAG_NUMEL
        flags = tuple(grad is not None for grad in self._arrivals.gradients)
        tail = self.tails.get((flags, label))
        if tail is None:
            chunk = torch.zeros(self.layout.tail_numel, dtype=torch.float32)
            chunk[: len(flags)] = torch.tensor(flags, dtype=torch.float32)
            # The pack divides what it writes, and a label must arrive as it is.
            chunk[-TAG_NUMEL:] = torch.tensor(label) * divisor
            tail = chunk.repeat(self._group.mesh.shard_size).to(self._group.mesh.device)
            self.tails[flags, label] = tail
        return tail
