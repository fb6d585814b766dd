"""Gradients that are sent in a narrower dtype than they are summed in:
`GradientPolicy(wire_dtype=...)`.

[Note: Wire dtype]
Each rank rounds its gradients to the wire dtype when it packs them. An all-to-all sends every rank
the pieces of its shard, and `ops.sum_chunks` adds them in float32 and in a fixed order, in the same
pass that divides and writes the gradient shard. A backend's reduce-scatter would round after each
addition. Partial sums that wait for a later micro-batch or for other replicas are float32.

    one axis:  round, exchange -> sum -> gradient shard
    two axes:  round, exchange -> sum -> round, exchange over the other axis -> sum -> gradient
    shard

A group of one rank sends nothing, so it rounds nothing. See docs/design/collectives.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from shardgrad import ops
from shardgrad.engine.buffers import Chunks
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.transports import MessageTag, StreamTransport, Transport, Work
from shardgrad.errors import CustomCommError, OptionError
from shardgrad.features.custom_comms import set_collectives
from shardgrad.features.hfsdp import OuterReduceScatter
from shardgrad.features.hsdp import ReplicaAllReduce
from shardgrad.sharding.layout import ALIGNMENT_NBYTES
from shardgrad.sharding.mesh import DataParallelMesh, TwoLevels

# -- what is refused


def refuse_too_many_ranks(mesh: DataParallelMesh) -> None:
    """Refuses axes with more ranks than `ops.sum_chunks` adds up in one launch.

    Raises:
        OptionError: an axis of the mesh is too long for gradients that have a wire dtype.
    """
    levels = [mesh.levels.outer] if mesh.levels else []
    replicas = [mesh.replicate_group] if mesh.replicate_group else []
    longest = max(group.size() for group in (mesh.gather_group, *levels, *replicas))
    if longest > ops.MAX_SUMMANDS:
        raise OptionError(
            "the mesh has too many ranks on an axis for gradients with a wire_dtype",
            expected=f"at most {ops.MAX_SUMMANDS:,} ranks on each axis of the mesh",
            got=f"{longest:,}",
            fix="a mesh with two axes (HSDP, or zero_stage='hfsdp'), or no wire_dtype",
        )


def exchange_gradients(group: ParamGroup) -> None:
    """Makes a new group send its gradients in the wire dtype of its policy.

    Raises:
        OptionError: gradients cannot be sent in this dtype or among so many ranks, or their reduce
            dtype is not float32.
    """
    wire_dtype = group.gradient_policy.wire_dtype
    if wire_dtype is not torch.bfloat16:
        raise OptionError(
            "gradients cannot be sent in this wire_dtype",
            expected="torch.bfloat16, or None for the reduce dtype",
            got=f"GradientPolicy(wire_dtype={wire_dtype})",
            fix="GradientPolicy(wire_dtype=torch.bfloat16)",
        )
    refuse_too_many_ranks(group.mesh)
    if group.reduce_dtype != torch.float32:
        raise OptionError(
            f"wire_dtype={wire_dtype} requires that gradients are summed in float32",
            expected="reduce_dtype=torch.float32, or None",
            got=f"reduce_dtype={group.reduce_dtype}",
            where=f"parameter {group.params[0].name}",
            fix="mp_policy=MixedPrecisionPolicy(..., reduce_dtype=torch.float32), or no wire_dtype",
        )
    set_collectives([group], exchanges=True)


def refuse_own_reduce_scatter(group: ParamGroup, comm: object) -> None:
    """Refuses a program's own reduce-scatter for gradients that have a wire dtype.

    Raises:
        CustomCommError: naming the first parameter.
    """
    if group.gradient_policy.wire_dtype is not None:
        raise CustomCommError(
            f"{type(comm).__name__} cannot reduce gradients that have a wire_dtype: the "
            "engine exchanges them itself",
            expected="a unit without GradientPolicy.wire_dtype",
            got=f"wire_dtype={group.gradient_policy.wire_dtype}",
            where=f"parameter {group.params[0].name}",
            fix="omit set_custom_reduce_scatter, or fully_shard(..., "
            "gradient_policy=GradientPolicy())",
        )


# -- how gradients are sent


class StreamExchange(StreamTransport):
    """A reduce-scatter as an all-to-all on the current stream. The reader of the work sums the
    chunks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.receive_chunks = self.size

    def reduce_scatter(self, send: Chunks, receive: Chunks, tag: MessageTag) -> Work:
        """See `Transport.reduce_scatter`: a chunk of each rank, in rank order."""
        call = partial(dist.all_to_all_single, receive.whole, send.whole, group=self.group)
        return self._start(call, receive.parts, tag)


def exchange_over(comm_ctx: CommContext, group: dist.ProcessGroup) -> Transport:
    """Returns the transport of `group` whose reduce-scatters receive chunks and not their sum."""
    transport = comm_ctx.transport(group)
    if transport.receive_chunks or not transport.sends:
        return transport  # it exchanges chunks already, or sends nothing
    return comm_ctx.own_transport(("exchange", group), partial(StreamExchange, group))


class ReplicaExchange(ReplicaAllReduce):
    """HSDP's second step: exchanges the ranks' sums over the replicas in `dtype`.

    Two replicas swap their sums. Of more than two, each sums one part, and the parts are
    all-gathered, also in `dtype`. Both send half the bytes of a float32 all-reduce.
    """

    def __init__(self, replicas: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(replicas)
        self._dtype = dtype
        self._size = replicas.size()

    def _part_numel(self, numel: int) -> int:
        """Returns the aligned number of elements that each of more than two replicas sums."""
        aligned = ALIGNMENT_NBYTES // self._dtype.itemsize
        return -(-numel // (self._size * aligned)) * aligned

    def room(self, comm_ctx: CommContext, chunk_numel: int) -> tuple[int, int]:
        """See `SecondStep`: what is sent, and what comes."""
        if self._size > 2:
            return _room(2 * self._size * self._part_numel(chunk_numel), self._dtype)
        return _room(self._size * chunk_numel, self._dtype)

    def launch(
        self, summed: torch.Tensor, room: Chunks, tag: MessageTag, comm_ctx: CommContext
    ) -> Work:
        """See `SecondStep`."""
        transport, numel = comm_ctx.transport(self._replicas), summed.numel()
        places = room.whole.view(self._dtype)
        if self._size == 2:
            both = _chunks(places, numel)
            own = both.part(transport.rank)
            ops.sum_chunks([summed], own)
            return _Followed(transport.all_gather(own, both, tag), lambda _: both.parts)
        part = self._part_numel(numel)
        half = self._size * part
        send, receive = _chunks(places[:half], part), _chunks(places[half:], part)
        ops.sum_chunks([summed], send.whole.narrow(0, 0, numel))
        # Parts have no space for tags. The reduce-scatter before them had one.
        own_tag = MessageTag(tag.what.replace("reduce-scatter", "exchange between replicas"))
        work = exchange_over(comm_ctx, self._replicas).reduce_scatter(send, receive, own_tag)

        def gather_sums(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            own = send.part(transport.rank)
            ops.sum_chunks(parts, own)
            transport.all_gather(own, receive, own_tag).wait()
            return [receive.whole.narrow(0, 0, numel)]

        return _Followed(work, gather_sums)


class _Followed(Work):
    """A collective whose result `follow` turns into the chunks to add up."""

    def __init__(
        self, first: Work, follow: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    ) -> None:
        self._first, self._follow = first, follow

    def wait(self) -> Sequence[torch.Tensor]:
        """See `Work`."""
        return self._follow(self._first.wait())


class OuterExchange(OuterReduceScatter):
    """The second step over two levels: sends an inner shard's sum to its outer ranks in `dtype`."""

    def __init__(self, levels: TwoLevels, dtype: torch.dtype) -> None:
        super().__init__(levels)
        self._dtype = dtype

    def room(self, context: CommContext, chunk_numel: int) -> tuple[int, int]:
        """See `SecondStep`: what is sent, and what comes."""
        transport = exchange_over(context, self._levels.outer)
        return _room((transport.size + transport.receive_chunks) * chunk_numel, self._dtype)

    def launch(
        self, summed: torch.Tensor, room: Chunks, tag: MessageTag, context: CommContext
    ) -> Work:
        """See `OuterReduceScatter.launch`; `summed` is only read."""
        transport = exchange_over(context, self._levels.outer)
        places, chunk_numel = room.whole.view(self._dtype), summed.numel() // transport.size
        send = _chunks(places[: summed.numel()], chunk_numel)
        ops.sum_chunks([summed], send.whole)
        return transport.reduce_scatter(send, _chunks(places[summed.numel() :], chunk_numel), tag)


def _room(numel: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the room for `numel` elements of `dtype` as one piece of float32."""
    return 1, numel * dtype.itemsize // torch.float32.itemsize


def _chunks(whole: torch.Tensor, numel: int) -> Chunks:
    return Chunks(whole, whole.numel() // numel)
