"""Processes with a device each, and ProcessGroupNCCL between them as torch built it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Chunks
from shardgrad.engine.transports import MessageTag, NcclTransport
from tests.cuda_runtime import inspection
from tests.support.ranks import Ranks

# The process group that torch 2.15 has for NCCL launches collectives that were coalesced one by
# one.
LAUNCHES_EACH = hasattr(dist, "ProcessGroupNCCL2")


def captured() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, out = torch.zeros(2, device="cuda"), torch.empty(2 * size, device="cuda")
    small = torch.empty(2, device="cuda")
    dist.all_gather_into_tensor(out, mine)
    dist.reduce_scatter_tensor(small, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        mine.add_(rank + 1)
        work = dist.all_gather_into_tensor(out, mine, async_op=True)
        work.wait()
        dist.reduce_scatter_tensor(small, out)
    for count in range(1, 4):
        graph.replay()
        assert small.tolist() == [size * count * (rank + 1.0)] * 2
    graph.reset()


def messages_of_a_group_together() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    transport, tag = NcclTransport(dist.group.WORLD), MessageTag("a message")
    sent = [torch.full((count,), 10.0 * rank + count, device="cuda") for count in (2, 3)]
    places = [torch.empty(size, each.numel(), device="cuda") for each in sent]
    messages = [
        (each, Chunks(place.view(-1), len(place)), tag)
        for each, place in zip(sent, places, strict=True)
    ]
    before = inspection.calls().get("nccl", 0)
    with transport.together(messages):
        works = [transport.all_gather(*each) for each in messages]
    for work, place, count in zip(works, places, (2, 3), strict=True):
        [gathered] = work.wait()
        assert gathered.view(size, count).tolist() == [
            [10.0 * r + count] * count for r in range(size)
        ]
        assert torch.equal(gathered.view_as(place), place)
    packed = [(chunks, Chunks(each[:0], 0), tag) for each, chunks, _ in messages]
    with transport.together(packed):
        works = [transport.reduce_scatter(*each) for each in packed]
    for work, count in zip(works, (2, 3), strict=True):
        assert work.wait()[0].tolist() == [size * (10.0 * rank + count)] * count
    launched = inspection.calls().get("nccl", 0) - before
    if LAUNCHES_EACH:
        assert launched == len(messages) + len(packed)
    else:  # in place, a group of one has nothing to reduce
        assert launched == (2 if size > 1 else 1)


def in_each(orders: list[str]) -> None:
    for order in orders:
        with inspection.order(order):
            messages_of_a_group_together()
            captured()
            torch.cuda.synchronize()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_exchange_data_in_every_order(world_size: int) -> None:
    ranks = Ranks(world_size, backend="cpu:gloo,cuda:nccl")
    try:
        ranks.run(in_each, ["host", "late", "7"])
    finally:
        ranks.stop()
