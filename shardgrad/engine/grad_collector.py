"""Gradients on their way from autograd's hook into a slot: they are collected, summed over
backwards that are not synchronized, then packed (FSDP2's copy-in).

[Note: Producer streams]
Autograd runs a parameter's hook on the stream of its AccumulateGrad node, the one that was current
when the parameter was first used. A gradient that arrives on another stream than the one the unit
was unsharded on (the *pack stream*) leaves an event there; the pack stream waits for exactly these
events before it packs, and those streams wait for the pack before their gradient's memory is handed
back.

[Note: Branches that send nothing back]
A unit frees its unsharded parameters when the gradients of its inputs are there. A branch whose
input was detached is missing in them; on another stream, it may still read what is freed. So the
stream that frees memory first waits for all producers.

[Note: Touched flags]
Behind the parameters each chunk has one element per parameter: 1 from a rank that had a gradient
for it, else 0. Summed along with the gradients, they tell every rank, at no extra message, which
parameters were touched anywhere: the others keep `grad = None`, since weight decay would act on
zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_not, or_
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from shardgrad import ops
from shardgrad.engine.buffers import Slot
from shardgrad.engine.comm_context import SecondStep
from shardgrad.engine.param import FSDPParam
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.streams import Stream, StreamEvent, Streams, keep_for_current_stream
from shardgrad.errors import GradientError
from shardgrad.sharding.layout import Piece, ShardLayout

__all__ = ["GradCollector"]

# What groups that are alike pack behind their parameters, by the ranks that it is for.
_tails: WeakKeyDictionary[dist.ProcessGroup, WeakValueDictionary[object, torch.Tensor]]
_tails = WeakKeyDictionary()


class GradCollector:
    """Collects the gradients of one group, in one backward after another, and packs them.

    Args:
        group: whose parameters they are.
        params: the trainable ones, in order.
        second: may want the chunks in another order.

    Attributes:
        layout: of the parameters, with a tail.
        gradients: per parameter, what has arrived.
        count: of these.
        summed: per parameter, whether the sums that wait on this rank have a gradient of it; () if
            none wait.
        pack_stream: what parameters were unsharded for; changed while no gradient is here.
        pack_streams: where gradients arrived or were packed on the pack stream of the time, which
            leave no event.
        tails: packed so far, by the stream that read them and their flags.
    """

    def __init__(
        self, group: ParamGroup, params: Sequence[FSDPParam], second: SecondStep | None
    ) -> None:
        self.params = list(params)
        self.layout = group.layout_of(params, with_flags=True)
        self.dtype = group.reduce_dtype
        self._mesh = group.mesh
        self._holds_dtensors = group.holds_dtensors
        self._second = second
        self._nothing = torch.empty(0, dtype=group.gather_dtype, device=group.mesh.device)
        self.tails: dict[tuple[Stream, tuple[bool, ...]], torch.Tensor] = {}
        self.pack_stream: Stream = None
        self.pack_streams: dict[Stream, None] = {}
        self._foreign: dict[Stream, StreamEvent] = {}
        self._earlier: list[torch.Tensor] = []
        # Of the sums, one whole gradient after the other; made for the first.
        self.sums = torch.empty(0, dtype=self.dtype, device=group.mesh.device)
        self._sums_used: StreamEvent | None = None
        self.summed: tuple[bool, ...] = ()
        self.expect()

    def expect(self) -> None:
        """Starts over, for the parameters' unsharded objects of now."""
        self._index = {id(p.unsharded): i for i, p in enumerate(self.params)}
        self.forget()

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All that gradients have arrived on since the last pack, the pack stream first."""
        return (self.pack_stream, *self._foreign)

    def touched(self) -> tuple[bool, ...]:
        """Returns, per parameter, whether a gradient of it is here or in the sums."""
        here = map(is_not, self.gradients, repeat(None))
        return tuple(map(or_, self.summed, here) if self.summed else here)

    def take(
        self,
        unsharded: torch.Tensor,
        grad: torch.Tensor,
        streams: Streams,
        *,
        is_written: bool = False,
    ) -> bool:
        """Takes a gradient, `is_written` by the program or autograd's; returns whether all are
        here.

        Streams: called on the stream of the parameter's AccumulateGrad node, which `grad` was
        written on.

        Raises:
            GradientError: it is sparse.
        """
        # Autograd would add the next gradient to this one, on whatever stream it runs then. It only
        # adds where one is bound, so each comes here by itself.
        unsharded.grad = None
        if grad.requires_grad:  # `create_graph=True`: the graph ends where gradients are reduced
            grad = grad.detach()
        index = self._index[id(unsharded)]
        if not (is_written or self.params[index].sharded.requires_grad):
            return False  # frozen since the forward
        if grad.layout is not torch.strided:
            raise GradientError(
                "a gradient of a sharded parameter cannot be used",
                expected="a dense gradient",
                got=f"layout {grad.layout}, shape {tuple(grad.shape)}",
                where=f"parameter {self.params[index].name}",
                fix="sparse=False in the embedding, or leave it out: fully_shard(..., "
                "ignored_params=...)",
            )
        stream = streams.current()
        earlier = self.gradients[index]
        if earlier is None:
            self.gradients[index] = grad
            self.count += 1
        else:
            self.gradients[index] = self._add(earlier, grad, stream, streams)
        if stream == self.pack_stream:
            self.pack_streams[stream] = None
        else:  # [Note: Producer streams]
            event = self._foreign.get(stream)
            if event is None:
                event = self._foreign[stream] = streams.event()
            event.record(stream)
        return self.count == len(self.gradients)

    def _add(
        self, earlier: torch.Tensor, grad: torch.Tensor, stream: Stream, streams: Streams
    ) -> torch.Tensor:
        """Adds a second gradient of a parameter, whose node reentrant checkpointing runs several
        times.
        """
        for event in self._foreign.values():
            event.wait(stream)
        # The earlier one may have come on the pack stream, which leaves no event of its own.
        packing = streams.event()
        packing.record(self.pack_stream)
        packing.wait(stream)
        self._earlier.append(earlier)  # not handed back before the pack, which comes after this sum
        return earlier + grad

    def wait_for_producers(self) -> None:
        """Makes the pack stream wait for every gradient that arrived on another one."""
        for event in self._foreign.values():
            event.wait(self.pack_stream)

    def order_before(self, stream: Stream, streams: Streams) -> None:
        """Makes `stream` wait for all gradients since the last call, packed or not.

        See [Note: Branches that send nothing back]. Free where all of backward runs on `stream`.
        """
        for event in self._foreign.values():
            event.wait(stream)
        # Several, if a unit was unsharded on one stream and recomputed on another.
        for packed_on in self.pack_streams:
            if packed_on != stream:
                event = streams.event()
                event.record(packed_on)
                event.wait(stream)
        self.pack_streams.clear()

    def let_go(self, streams: Streams) -> None:
        """Drops the gradients, once their streams are ordered after what the pack stream did with
        them.
        """
        self.pack_streams[self.pack_stream] = None
        # The allocator lends a gradient's memory again on the stream that wrote it, which therefore
        # has to come after the pack that read it.
        if self._foreign:
            packed = streams.event()
            packed.record(self.pack_stream)
            for stream in self._foreign:
                packed.wait(stream)
        self.forget()

    def forget(self) -> None:
        """Drops the gradients."""
        self.gradients: list[torch.Tensor | None] = [None] * len(self.params)
        self._foreign.clear()
        self._earlier.clear()
        self.count = 0

    # -- sums of backwards that are not synchronized

    def add_up(self, streams: Streams) -> None:
        """Adds what has arrived to the sums that wait on this rank; lets the gradients go.

        Streams: the pack stream, after every producer. Capture: safe; the memory stays.
        """
        stream, layout = self.pack_stream, self.layout.whole
        self.wait_for_producers()
        with streams.on(stream):
            if self._sums_used is None:
                with torch.inference_mode(mode=False):
                    self.sums = self.sums.new_empty(layout.chunk_numel)
                self._sums_used = streams.event()
            self._sums_used.wait(stream)  # earlier backwards may have packed on another one
            ops.pack(
                self._contiguous(),
                self.sums,
                layout.table,
                chunk_numel=layout.chunk_numel,
                accumulate=bool(self.summed),
            )
            self._sums_used.record(stream)
        self.summed = self.touched()
        self.let_go(streams)

    # -- packing

    def pack(
        self,
        slot: Slot | None,
        touched: tuple[bool, ...],
        target: torch.Tensor,
        streams: Streams,
        divisor: float,
        *,
        accumulate: bool = False,
        zero_copy: bool = False,
    ) -> list[torch.Tensor]:
        """Writes what has been collected, the sums with it, and the tail, into the chunks of all
        ranks; lets the gradients go.

        `target` is 1-D, in `slot`, or the gradient shard if that is None; the tail says what was
        `touched`. With `zero_copy`, `divisor` is 1 and zero-copy parameters are left out.

        Returns:
            The gradients of zero-copy parameters, 1-D in the gather dtype, zeros where none has
            arrived, to be read until the slot is released.

        Streams: the pack stream, after the slot is free and after every producer.
        """
        stream, layout, tail = self.pack_stream, self.layout, self._tail(touched)
        used = self._sums_used if self.summed else None
        if used is not None and self.count:
            self.add_up(streams)
        if slot is not None:
            slot.start_writing(stream)
        self.wait_for_producers()
        with streams.on(stream):  # nothing here requires grad, so there is nothing to switch off
            if used is None:
                grads = self._contiguous()
            else:
                used.wait(stream)
                grads = self.layout.whole.local_views(self.sums, 0)
            sent_alone = []
            if zero_copy and slot is not None:
                for i in layout.zero_copy:
                    # The next backward may write to the sums before they are sent.
                    flat = self._flat(grads[i], layout.pieces[i], copies=used is not None)
                    sent_alone.append(flat)
                grads = [grads[i] for i in layout.others]
                slot.lend(sent_alone, self.streams)
                layout = layout.packed
            self._fill(grads, tail, target, layout, divisor, accumulate=accumulate)
        if used is not None:
            used.record(stream)
            self.summed = ()
        if slot is not None:
            slot.finish_writing(stream)
        self.let_go(streams)
        return sent_alone

    def _contiguous(self) -> list[torch.Tensor]:
        """Returns this rank's part of each gradient as the pack reads it; an empty tensor where
        none is.
        """
        found = []
        for i, grad in enumerate(self.gradients):
            if grad is None:
                # `ops.pack` writes zeros in its place: other ranks may have a gradient to add to.
                found.append(self._nothing)
                continue
            if self._holds_dtensors:
                grad = self.params[i].sharding.local_gradient(grad)
            found.append(grad.contiguous())
        return found

    def _flat(self, grad: torch.Tensor, piece: Piece, *, copies: bool) -> torch.Tensor:
        """Returns a gradient as it is sent by itself."""
        if not grad.numel():
            return grad.new_zeros(piece.numel, dtype=self._nothing.dtype)
        return grad.to(self._nothing.dtype, copy=copies).view(-1)

    def _fill(
        self,
        grads: list[torch.Tensor],
        tail: torch.Tensor,
        target: torch.Tensor,
        layout: ShardLayout,
        divisor: float,
        *,
        accumulate: bool,
    ) -> None:
        table, chunk_numel = layout.table_with_tail, layout.chunk_numel
        rows = grads
        # What is cut along an inner dim has gaps, which the table of `ops.pack` cannot say.
        if layout.strided:
            from shardgrad.sharding.strided_pack import pack_strided

            pack_strided(grads, target, layout, divisor=divisor, accumulate=accumulate)
            rows = [grads[i] for i in layout.straight]
        rows = [*rows, tail]
        if self._second is not None:
            rows, table, chunk_numel = self._second.arrange(rows, table, chunk_numel)
        ops.pack(
            rows, target, table, chunk_numel=chunk_numel, divisor=divisor, accumulate=accumulate
        )

    def _tail(self, flags: tuple[bool, ...]) -> torch.Tensor:
        """Returns what is packed behind the parameters, for each rank; one launch with usual
        gradients. Groups that are alike share it: it has 128 bytes for each rank.
        """
        place = self.pack_stream, flags
        tail = self.tails.get(place)
        if tail is None:
            mesh, numel = self._mesh, self.layout.tail_numel
            dtype = self._nothing.dtype if self._nothing.is_floating_point() else torch.float32
            shared = _tails.setdefault(mesh.shard_group, WeakValueDictionary())
            key = flags, numel, dtype, mesh.device
            tail = shared.get(key)
            if tail is None:
                chunk = torch.zeros(numel, dtype=dtype)
                chunk[: len(flags)] = torch.tensor(flags, dtype=dtype)
                # One copy from the host for each pattern of flags, of which a training run has few.
                tail = shared[key] = chunk.repeat(mesh.shard_size).to(mesh.device)
            self.tails[place] = tail
            # Another group may have made it on another stream, and the last one drops it.
            keep_for_current_stream(tail)
        return tail
