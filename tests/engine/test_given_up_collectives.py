"""A collective that was given up may still end; what it then writes to is memory that nothing else
has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.buffers import Chunks, SlotRing
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.reduction import PartialSum, Reduction
from shardgrad.engine.transports import MessageTag, PendingWork
from shardgrad.errors import CollectiveError, DesyncError
from shardgrad.graphs.outputs import storage_of
from tests.support.parity import SHARDGRAD
from tests.support.ranks import on_ranks

FEW, MANY = 100, 200  # features: room for the one is not enough for the other
NUMEL = 5000


def give_up(group: dist.ProcessGroup) -> None:
    """Does what the watchdog does about the last collective that this rank has started in a
    group.
    """
    error = CollectiveError("it cannot end", expected="every rank", where="here", fix="go on")
    assert recorder.last is not None
    recorder.verdict = recorder.last, error


def sevens(nbytes: int) -> list[Tensor]:
    """Returns tensors of about this size; one of them gets memory of this size that was just
    freed.
    """
    return [torch.full((nbytes,), 7, dtype=torch.uint8) for _ in range(64)]


def are_sevens(tensors: Sequence[Tensor]) -> bool:
    return all(bool((tensor == 7).all()) for tensor in tensors)


@on_ranks(2)
def test_what_an_all_gather_that_was_given_up_brings_is_written_to_its_old_memory() -> None:
    group = dist.new_group(backend="gloo")
    store, go_on = dist.distributed_c10d._get_default_store(), f"{group.group_name}: go on"
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    layers = few, second, many = [nn.Linear(n, n) for n in (FEW, FEW, MANY)]
    right = few.weight.detach().clone(), many.weight.detach().clone()
    model = nn.Sequential(*(SHARDGRAD.fully_shard(layer, mesh=mesh) for layer in layers))
    SHARDGRAD.fully_shard(model, mesh=mesh).unshard()  # nothing but lazy init
    if dist.get_rank() == 0:
        handle = few.unshard(async_op=True)
        give_up(group)
        with pytest.raises(CollectiveError, match="cannot end"):
            handle.wait()
        assert recorder.verdict is None  # which would keep frames alive
        handles = [second.unshard(async_op=True), many.unshard(async_op=True)]
        # The third one is in the slot of the first, which had to grow.
        kept = sevens(4 * FEW * FEW // 2)
        store.set(go_on, "")
        for handle in handles:
            # after the first message, in the order in which the other rank sends them
            handle.wait()
        assert are_sevens(kept)
    else:
        store.wait([go_on])
        time.sleep(1.5)  # what was given up says nothing about later ones, however long they take
        for layer in layers:
            layer.unshard()
    assert torch.equal(many.weight, right[1])
    few.reshard()
    few.unshard()
    assert torch.equal(few.weight, right[0])


@on_ranks(2)
def test_what_leaves_the_end_of_a_message_unwritten_is_not_taken_for_the_one_before() -> None:
    """As a message that is too short does, of a rank that is elsewhere."""
    transport = CommContext(torch.device("cpu")).transport(dist.group.WORLD)
    tag, staging = MessageTag.of("all-gather of few", 0), Chunks(torch.empty(2 * NUMEL), 2)
    transport.all_gather(torch.ones(NUMEL), staging, tag).wait()
    nothing = dist.barrier(async_op=True)
    with (
        mock.patch.object(dist, "all_to_all_single", return_value=nothing),
        pytest.raises(DesyncError, match=f"rank {1 - dist.get_rank()} is out of sync"),
    ):
        transport.all_gather(torch.ones(NUMEL), staging, tag).wait()


@pytest.mark.parametrize("reason", [CollectiveError, KeyboardInterrupt])
@on_ranks(2)
def test_what_an_abandoned_reduction_brings_is_written_to_its_old_memory(
    reason: type[BaseException],
) -> None:
    group = dist.new_group(backend="gloo")
    store, go_on = dist.distributed_c10d._get_default_store(), f"{group.group_name}: go on"
    comm_ctx, tag = CommContext(torch.device("cpu")), MessageTag.of("reduce-scatter of few", 2)
    ring = SlotRing(comm_ctx.streams, comm_ctx.device, depth=1, elastic=False)
    sizes = [(torch.float32, 2, NUMEL), (torch.float32, 1, NUMEL)]
    slot, (send, receive) = ring.take(sizes, comm_ctx.streams.reduce)
    send.whole.fill_(1.0)
    if dist.get_rank() == 1:
        store.wait([go_on])
    transport = comm_ctx.transport(group)
    work = transport.reduce_scatter(send, receive, tag)
    if dist.get_rank() == 1:
        work.wait()
        return
    end, done = comm_ctx.streams.reduce, comm_ctx.streams.event()
    route: Any = SimpleNamespace(end=end, done=done, second=None)
    reduction = Reduction(
        route=route,
        works=[(0, NUMEL, work)],
        slot=slot,
        shard=None,
        touched=(),
        has_sums=False,
        second=None,
        partial=PartialSum(),
        reader=comm_ctx.streams.current(),
        pack_stream=comm_ctx.streams.current(),
        end=end,
    )
    slot.finish = reduction.complete
    if reason is CollectiveError:
        give_up(group)
        reduction.abandon()
    else:
        with mock.patch.object(type(work), "wait", side_effect=reason), pytest.raises(reason):
            reduction.abandon()
    assert slot.finish is None
    ring.take([(torch.float32, 7, NUMEL)], comm_ctx.streams.reduce)
    assert storage_of(slot.bytes) != storage_of(send.whole)
    store.set(go_on, "")
    assert isinstance(work, PendingWork)
    assert work._work is not None
    work._work.wait()
    assert receive.whole[0] == 1.0
