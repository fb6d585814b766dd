"""Gradients that travel in float8: `GradientPolicy(wire_dtype=torch.float8_e4m3fn)`.

[Note: Error feedback]
Gradients are packed in float32. Where a message leaves, `ops.quantize` makes float8 of it, in
blocks with a scale each ([Note: Float8 blocks] in `ops/float8.py`), and keeps on this rank what
that has lost. The next message of the same group takes it along, so that over some steps the
gradients that arrive add up to those that autograd has made. `ops.sum_quantized` adds up what has
come from all ranks, in float32, in rank order.

    one axis:  pack, quantize, exchange -> sum -> gradient shard
    two axes:  pack, quantize, exchange -> sum -> quantize, exchange over the other axis -> sum ->
    shard

What is kept is a byte for each element that this rank sends, and one for each block: of all of its
gradients, and on two axes also of its sums. It is memory with fixed addresses, so a captured step
has the bits of an eager one. It goes with the places of the gradients: when these change, and after
a backward that failed, it starts from zero. See docs/design/float8_wire.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardgrad import ops
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.streams import Streams
from shardgrad.engine.transports import MessageTag, Transport, Work
from shardgrad.engine.unit import units_under
from shardgrad.features.custom_comms import collectives_of
from shardgrad.features.hfsdp import OuterReduceScatter
from shardgrad.features.hsdp import ReplicaAllReduce
from shardgrad.features.wire_dtype import Exchange, exchange_over
from shardgrad.sharding.layout import ALIGNMENT_NBYTES, TAG_NUMEL, ShardLayout
from shardgrad.sharding.mesh import DataParallelMesh, TwoLevels

__all__ = [
    "ErrorFeedback",
    "Float8Exchange",
    "Float8OuterExchange",
    "Float8ReplicaExchange",
    "error_feedback",
    "error_feedback_of",
]

_BLOCK = ops.FLOAT8_BLOCK_NUMEL
# What is lost where a message is made: for the ranks of a shard, for the other axis, of parts added
# up there.
_SHARDS, _OTHER_AXIS, _PARTS = "shards", "other axis", "parts"


# -- what is kept
# -------------------------------------------------------------------------------------------


class ErrorFeedback:
    """What one group's messages have lost, for its next ones to take along. See [Note: Error
    feedback].
    """

    def __init__(self) -> None:
        self._layout: ShardLayout | None = None
        self._kept: dict[str, torch.Tensor] = {}

    @property
    def layout(self) -> ShardLayout:
        """The places of the gradients that are sent."""
        if self._layout is None:
            raise RuntimeError("messages have no layout yet")
        return self._layout

    def belongs_to(self, layout: ShardLayout) -> None:
        """Forgets what was lost in other places."""
        if layout is not self._layout:
            self._layout = layout
            self._kept.clear()

    def of(self, what: str, numel: int, device: torch.device) -> torch.Tensor:
        """Returns the memory for what messages of `numel` values lose, as `ops.quantize` takes it.

        Streams: it is allocated, and zeroed, on the current one.
        """
        kept = self._kept.get(what)
        if kept is None:
            with torch.inference_mode(mode=False):
                kept = torch.zeros(numel + numel // _BLOCK, dtype=torch.uint8, device=device)
            self._kept[what] = kept
        return kept

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields what there is, by where it was lost."""
        yield from self._kept.items()

    def zero(self, streams: Streams) -> None:
        """Starts over; the host has waited for what has used it."""
        with streams.on(streams.reduce):  # every message comes after the reduction it belongs to
            for kept in self._kept.values():
                kept.zero_()


class Float8Exchange(Exchange):
    """Reductions of one group that travel in float8."""

    keeps_dtype = False

    def __init__(self) -> None:
        self.feedback = ErrorFeedback()

    def over(
        self, comm_ctx: CommContext, group: dist.ProcessGroup, layout: ShardLayout
    ) -> Transport:
        """See `Exchange`."""
        self.feedback.belongs_to(layout)
        carrier = exchange_over(comm_ctx, group)
        if carrier.size == 1:
            return carrier
        return _Float8Transport(carrier, self.feedback, _SHARDS, layout.world_size // carrier.size)

    def start_over(self, streams: Streams) -> None:
        """See `Exchange`."""
        self.feedback.zero(streams)


def error_feedback_of(grads: GradGroup) -> list[tuple[str, torch.Tensor]]:
    """Returns what a group keeps, by where it was lost; nothing if its gradients do not travel in
    float8.
    """
    exchange = collectives_of(grads.group).exchange
    return list(exchange.feedback.items()) if isinstance(exchange, Float8Exchange) else []


def error_feedback(model: nn.Module) -> dict[str, DTensor]:
    """Returns what float8 messages have lost and later ones will take along, to be saved and
    loaded.

    The tensors are the memory itself, so that loading in place, as `torch.distributed.checkpoint`
    does, is all it takes:

        state = {"model": ..., "optimizer": ..., "feedback": shardgrad.error_feedback(model)}

    It belongs to the ranks that there are. Training that goes on with another number of ranks
    leaves it out, and starts from zero.

    Args:
        model: whose units have `GradientPolicy(wire_dtype=torch.float8_e4m3fn)`; others add
            nothing.

    Returns:
        By unit, group and message, uint8 of shape `[ranks, bytes]`, of which each rank holds its
        row.

    Streams: memory that is missing yet is allocated on the current one, and so is what a program
    loads
        expected to be written there.
    Capture: not safe; it may allocate.
    """
    found = {}
    names = {
        id(module): name for name, module in model.named_modules()
    }  # units get theirs at lazy init
    for unit in units_under(model):
        name = names[id(unit.modules[0])] or "root"
        for i, grads in enumerate(unit.grad_groups):
            exchange, mesh = collectives_of(grads.group).exchange, grads.group.mesh
            if not isinstance(exchange, Float8Exchange):
                continue
            grads.refresh_trainable()
            exchange.feedback.belongs_to(grads.packer.layout)
            for what, numel in _sent(mesh, grads.packer.layout) if grads.params else ():
                exchange.feedback.of(what, numel, mesh.device)
            placements = [Shard(0)] * mesh.mesh.ndim
            for what, kept in exchange.feedback.items():
                row = DTensor.from_local(kept.unsqueeze(0), mesh.mesh, placements, run_check=False)
                found[f"{name}.{i}.{what}"] = row
    return found


def _sent(mesh: DataParallelMesh, layout: ShardLayout) -> Iterator[tuple[str, int]]:
    """Yields the messages that this rank makes in a reduction, each with the number of its
    values.
    """
    chunk_numel, replicas = layout.chunk_numel, mesh.replicate_group
    if mesh.gather_group.size() > 1:
        yield _SHARDS, mesh.shard_size * chunk_numel
    if mesh.levels is not None:
        if mesh.levels.outer.size() > 1:
            yield _OTHER_AXIS, mesh.levels.outer.size() * chunk_numel
    elif replicas is not None and replicas.size() > 1:
        yield _OTHER_AXIS, chunk_numel
        if replicas.size() > 2:
            yield _PARTS, _part_numel(chunk_numel, replicas.size())


# -- how gradients travel
# -----------------------------------------------------------------------------------


def _row_nbytes(numel: int) -> int:
    """Returns the bytes of a row of a message, which ends in room for a tag."""
    nbytes = numel + numel // _BLOCK + TAG_NUMEL
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def _rows(whole: torch.Tensor, count: int, numel: int) -> tuple[Chunks, torch.Tensor]:
    """Cuts off `count` rows of a message, each of `numel` values; returns them and what is left."""
    nbytes = _row_nbytes(numel)
    rows = whole[: count * nbytes]
    return Chunks(rows, rows.split(nbytes)), whole[count * nbytes :]


class _Float8Transport(Transport):
    """A reduce-scatter of float32 chunks as an exchange of float8, which `carrier` carries.

    Args:
        carrier: brings each rank its row of the message of every rank.
        feedback: of the group.
        what: is lost here.
        pieces: that a chunk of a message consists of, each as long as the layout's.
    """

    sends = True

    def __init__(
        self, carrier: Transport, feedback: ErrorFeedback, what: str, pieces: int = 1
    ) -> None:
        super().__init__(carrier.group)
        self._carrier, self._feedback, self._what = carrier, feedback, what
        self._numel = pieces * feedback.layout.chunk_numel
        self.stream_ordered = carrier.stream_ordered
        self.gather_chunks, self.gathers_in_place = carrier.gather_chunks, carrier.gathers_in_place
        nbytes = (self.size + carrier.receive_chunks) * _row_nbytes(self._numel)
        self.receive_chunks = -(-nbytes // (self._numel * torch.float32.itemsize))  # of float32

    def all_gather(self, chunk: torch.Tensor, staging: Chunks, tag: MessageTag) -> Work:
        """See `Transport.all_gather`."""
        return self._carrier.all_gather(chunk, staging, tag)

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`: the sum takes the place of this rank's chunk of `send`.

        Capture: safe, once there is memory for what is lost.
        """
        message, room = _rows(receive.whole.view(torch.uint8), self.size, self._numel)
        received, _ = _rows(room, self._carrier.receive_chunks, self._numel)
        _quantize(send.whole, message, self._numel, self._feedback, self._what)
        work = self._carrier.reduce_scatter(message, received, tag)
        return _Sum(work, send.parts[self.rank], self._numel)


@dataclass(eq=False)
class _Sum:
    """Messages on their way, whose sum is written when they are waited for."""

    _work: Work
    _out: torch.Tensor
    _row_numel: int

    def wait(self) -> list[torch.Tensor]:
        """See `Work`."""
        _sum(self._work.wait(), self._out, self._row_numel)
        return [self._out]


def _sum(messages: list[torch.Tensor], out: torch.Tensor, row_numel: int) -> None:
    ops.sum_quantized(messages, out, row_numel=row_numel, row_nbytes=_row_nbytes(row_numel))


def _quantize(
    values: torch.Tensor,
    message: Chunks,
    row_numel: int,
    feedback: ErrorFeedback,
    what: str,
    begin: int = 0,
) -> None:
    """Makes a message of values that lie in chunks from their element `begin` on."""
    layout, numel = feedback.layout, values.numel()
    period, tail_offset = layout.chunk_numel, layout.tail_offset
    if begin:
        period, tail_offset = numel, min(max(tail_offset - begin, 0), numel)
    kept = feedback.of(
        what, max(numel, row_numel), values.device
    )  # as large on the rank of a short part
    ops.quantize(
        values,
        kept[: numel + numel // _BLOCK],
        message.whole,
        row_numel=row_numel,
        row_nbytes=_row_nbytes(row_numel),
        period=period,
        tail_offset=tail_offset,
    )


# -- over the other axis
# ------------------------------------------------------------------------------------


class Float8OuterExchange(OuterReduceScatter):
    """The second step over two levels: an inner shard's sum goes to its outer ranks in float8."""

    def __init__(self, levels: TwoLevels, feedback: ErrorFeedback) -> None:
        super().__init__(levels)
        self._feedback = feedback
        self._made: tuple[tuple[object, ...], Transport] | None = None

    def _transport(self, context: CommContext) -> Transport:
        made_for = context, self._feedback.layout
        if self._made is None or self._made[0] != made_for:
            carrier = exchange_over(context, self._levels.outer)
            self._made = made_for, _Float8Transport(carrier, self._feedback, _OTHER_AXIS)
        return self._made[1]


def _part(numel: int, rank: int, size: int) -> tuple[int, int]:
    """Returns where the part of a chunk begins and ends that one of more than two replicas adds
    up.
    """
    part = _part_numel(numel, size)
    return min(rank * part, numel), min((rank + 1) * part, numel)


def _part_numel(numel: int, size: int) -> int:
    return -(-numel // (size * _BLOCK)) * _BLOCK


class Float8ReplicaExchange(ReplicaAllReduce):
    """HSDP's second step: this rank's sum goes to the replicas in float8, and comes back from all
    of them.

    As in `ReplicaExchange`, two replicas swap their sums; among more, each adds up one part, of
    which it makes float8 once more, and the parts are gathered.
    """

    def __init__(self, replicas: dist.ProcessGroup, feedback: ErrorFeedback) -> None:
        super().__init__(replicas)
        self._feedback = feedback
        self._size = replicas.size()

    def room(self, comm_ctx: CommContext, chunk_numel: int) -> tuple[int, int]:
        """See `SecondStep`: what is sent, and what comes."""
        rows, row_numel = 1 + comm_ctx.transport(self._replicas).gather_chunks, chunk_numel
        if self._size > 2:
            rows, row_numel = 2 * self._size, _part_numel(chunk_numel, self._size)
        return 1, rows * _row_nbytes(row_numel) // torch.float32.itemsize

    def launch(
        self, summed: torch.Tensor, room: Chunks, tag: MessageTag, comm_ctx: CommContext
    ) -> Work:
        """See `SecondStep`."""
        transport, numel = comm_ctx.transport(self._replicas), summed.numel()
        places = room.whole.view(torch.uint8)
        if self._size == 2:
            message, rest = _rows(places, 1, numel)
            received, _ = _rows(rest, transport.gather_chunks, numel)
            _quantize(summed, message, numel, self._feedback, _OTHER_AXIS)
            return _Sum(transport.all_gather(message.whole, received, tag), summed, numel)
        row_numel = _part_numel(numel, self._size)
        message, rest = _rows(places, self._size, row_numel)
        received, _ = _rows(rest, self._size, row_numel)
        _quantize(summed, message, row_numel, self._feedback, _OTHER_AXIS)
        own_tag = MessageTag(tag.what.replace("reduce-scatter", "exchange between replicas"))
        work = exchange_over(comm_ctx, self._replicas).reduce_scatter(message, received, own_tag)
        return _GatheredSums(
            work, summed, message, received, row_numel, transport, self._feedback, own_tag
        )


@dataclass(eq=False)
class _GatheredSums:
    """An exchange whose sums, of a part each, are gathered when it is waited for."""

    _exchange: Work
    _out: torch.Tensor
    _message: Chunks
    _room: Chunks
    _row_numel: int
    _transport: Transport
    _feedback: ErrorFeedback
    _tag: MessageTag

    def wait(self) -> list[torch.Tensor]:
        """See `Work`."""
        rank, row_numel, received = self._transport.rank, self._row_numel, self._exchange.wait()
        begin, end = _part(self._out.numel(), rank, self._transport.size)
        own = Chunks(self._message.parts[rank], (self._message.parts[rank],))
        if end > begin:
            part = self._out.narrow(0, begin, end - begin)
            _sum(received, part, row_numel)
            _quantize(part, own, row_numel, self._feedback, _PARTS, begin)
        self._transport.all_gather(own.whole, self._room, self._tag).wait()
        _sum([self._room.whole], self._out, row_numel)
        return [self._out]
