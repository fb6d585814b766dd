"""Order between streams, on paper: who waits for whom when the engine runs on recorded streams."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgrad.engine.grad_collector
import shardgrad.engine.grad_group
import shardgrad.engine.reduction
import shardgrad.engine.root
import shardgrad.engine.scheduler
import shardgrad.engine.unsharded
from shardgrad import fully_shard, ops
from shardgrad.engine.all_gather import AllGatherInput
from shardgrad.engine.buffers import Slot, SlotRing
from shardgrad.engine.grad_collector import GradCollector
from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.transports import LocalTransport
from tests.support.recorded_streams import RecordedStreams

_IS_LOCAL = GradGroup._is_local


@pytest.fixture(params=[False, True], ids=["message", "alone"])
def streams(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RecordedStreams]:
    """One rank on recorded streams; the engine's kernels and collectives report what they touch.

    It sends messages, as several ranks do, or reads and writes its shards alone.
    """
    if not request.param:
        monkeypatch.setattr(GradGroup, "_is_local", lambda self, transport: False)
        # So its chunk needs a slot.
        monkeypatch.setattr(AllGatherInput, "supports_zero_copy", False)
    recorded = RecordedStreams()
    monkeypatch.setattr("shardgrad.engine.comm_context.streams_for", lambda device: recorded)

    def pack(grads: Any, slot: Any, table: Any, **kwargs: Any) -> None:
        for grad in grads:
            recorded.access("pack reads gradient", grad, writes=False)
        recorded.access("pack writes slot", slot, writes=True)
        ops.pack(grads, slot, table, **kwargs)

    def unpack(gathered: Any, flat: Any, table: Any, **kwargs: Any) -> None:
        recorded.access("unpack reads chunks", gathered, writes=False)
        recorded.access("unpack writes parameters", flat, writes=True)
        ops.unpack(gathered, flat, table, **kwargs)

    def sum_chunks(chunks: Any, out: Any, **kwargs: Any) -> None:
        for chunk in chunks:
            recorded.access("sum reads chunk", chunk, writes=False)
        recorded.access("sum writes gradients", out, writes=True)
        ops.sum_chunks(chunks, out, **kwargs)

    recording_ops = SimpleNamespace(pack=pack, unpack=unpack, sum_chunks=sum_chunks)
    monkeypatch.setattr(shardgrad.engine.grad_collector, "ops", recording_ops)
    monkeypatch.setattr(shardgrad.engine.reduction, "ops", recording_ops)
    monkeypatch.setattr(shardgrad.engine.unsharded, "ops", recording_ops)

    scatter = LocalTransport.reduce_scatter

    def reduce_scatter(self: Any, send: Any, receive: Any, tag: Any) -> Any:
        recorded.access("reduce-scatter reads slot", send.whole, writes=False)
        return scatter(self, send, receive, tag)

    monkeypatch.setattr(LocalTransport, "reduce_scatter", reduce_scatter)
    # As on several ranks, gradients go through slots.
    monkeypatch.setattr(GradGroup, "_is_local", lambda self, transport: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield recorded
    dist.destroy_process_group()


def arriving_on(
    monkeypatch: pytest.MonkeyPatch, streams: RecordedStreams, choose: Callable[[torch.Tensor], str]
) -> None:
    """Makes each gradient be written, and its hook run, on the stream `choose` picks.

    This is what autograd does on a device: a hook runs on the stream of its AccumulateGrad node,
    which autograd orders after the stream that computed the gradient, and no other stream after it.
    """
    arrive = shardgrad.engine.grad_group._collect

    def on_chosen_stream(owner: weakref.ref[GradGroup], unsharded: torch.Tensor) -> None:
        computed = streams.event()
        computed.record(streams.current())
        with streams.on(choose(unsharded)):
            computed.wait(streams.current())
            if unsharded.grad is not None:
                streams.access("backward writes gradient", unsharded.grad, writes=True)
            arrive(owner, unsharded)

    monkeypatch.setattr(shardgrad.engine.grad_group, "_collect", on_chosen_stream)


def two_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_plain_step_has_no_hazard(streams: RecordedStreams) -> None:
    train(two_layers())
    assert streams.hazards == []


def test_gradients_that_one_rank_packs_straight_into_its_shard_have_no_hazard(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradGroup, "_is_local", _IS_LOCAL)
    arriving_on(monkeypatch, streams, lambda param: f"side {param.ndim}")
    train(two_layers())
    assert streams.hazards == []


def test_a_missing_wait_before_they_are_packed_is_found(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GradGroup, "_is_local", _IS_LOCAL)
    arriving_on(monkeypatch, streams, lambda param: f"side {param.ndim}")
    monkeypatch.setattr(GradCollector, "wait_for_producers", lambda self: None)
    train(two_layers())
    assert streams.hazards


def test_a_hook_born_on_a_side_stream_is_waited_for(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving_on(monkeypatch, streams, lambda param: "side")
    train(two_layers())
    assert streams.hazards == []


def test_reduction_waits_for_every_producer(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving_on(monkeypatch, streams, lambda param: "side one" if param.ndim == 1 else "side two")
    train(two_layers())
    assert streams.hazards == []


def test_accumulation_without_sync_waits_for_every_producer(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving_on(monkeypatch, streams, lambda param: f"side {param.ndim}")
    model = two_layers()
    for last in (False, False, True, False, True):
        model.set_requires_gradient_sync(last)
        model(torch.randn(4, 8)).sum().backward()
    assert streams.hazards == []


@pytest.mark.parametrize("broken", ["foreign producers", "ready of the slot", "free of the slot"])
def test_a_missing_wait_is_found(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The recorder can fail: each wait, taken out, is a hazard."""
    if broken != "foreign producers":  # a slot, which one rank alone has no use for
        monkeypatch.setattr(GradGroup, "_is_local", lambda self, transport: False)
    arriving_on(monkeypatch, streams, lambda param: f"side {param.ndim}")
    if broken == "foreign producers":
        arrive = shardgrad.engine.grad_group._collect

        def forget(owner: weakref.ref[GradGroup], unsharded: torch.Tensor) -> None:
            arrive(owner, unsharded)
            grads = owner()
            assert grads is not None
            grads.collector._foreign.clear()

        monkeypatch.setattr(shardgrad.engine.grad_group, "_collect", forget)
    elif broken == "ready of the slot":
        monkeypatch.setattr(Slot, "start_reading", lambda self, stream: None)
    else:
        release = Slot.release

        def release_without_mark(self: Slot, stream: Any) -> None:
            self._free = streams.event()
            free, self._free = self._free, streams.event()
            release(self, stream)
            self._free = free

        monkeypatch.setattr(Slot, "release", release_without_mark)
    train(two_layers())
    assert streams.hazards


def test_a_gradient_freed_after_packing_is_not_reused_before_it(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer's stream, which gets the gradient's memory back, waits for the pack that reads
    it.
    """
    arriving_on(monkeypatch, streams, lambda param: "side")
    let_go = GradCollector.let_go
    kept_from_the_host_allocator: list[torch.Tensor] = []

    def reuse(self: GradCollector, *args: Any) -> None:
        freed = [grad for grad in self.gradients if grad is not None]
        kept_from_the_host_allocator.extend(freed)
        let_go(self, *args)
        with streams.on("side"):
            for grad in freed:
                streams.access("side stream reuses the memory", grad, writes=True)

    monkeypatch.setattr(GradCollector, "let_go", reuse)
    train(two_layers())
    assert streams.hazards == []


def test_the_writer_of_one_slot_does_not_wait_for_the_reduction_of_another(
    streams: RecordedStreams,
) -> None:
    ring = SlotRing(streams, torch.device("cpu"), depth=2, elastic=False)
    holder = SimpleNamespace(complete=lambda: None)
    first = acquired(ring, holder)
    first.start_writing("compute")
    first.finish_writing("compute")
    first.start_reading("reduce")
    reduction = streams.tick("reduce")["reduce"]
    first.release("reduce")
    second = acquired(ring, holder)
    assert second is not first
    second.start_writing("compute")
    assert not streams.happens_before("reduce", reduction, "compute")
    second.release("compute")
    third = acquired(ring, holder)
    assert third is first
    third.start_writing("compute")
    assert streams.happens_before("reduce", reduction, "compute")


def acquired(ring: SlotRing, holder: Any) -> Slot:
    slot = ring.acquire(64)
    slot.holder = holder
    return slot


def test_what_is_lent_for_a_message_lives_until_the_slot_is_released(
    streams: RecordedStreams,
) -> None:
    ring = SlotRing(streams, torch.device("cpu"), depth=2, elastic=False)
    slot = acquired(ring, SimpleNamespace(complete=lambda: None))
    gradient = torch.zeros(64)
    alive = weakref.ref(gradient)
    slot.start_writing("compute")
    slot.lend([gradient], ["compute"])
    del gradient
    sent = streams.tick("reduce")["reduce"]
    assert alive() is not None
    slot.release("reduce")
    ring.rewind()
    assert alive() is None
    assert streams.happens_before("reduce", sent, "compute"), "its memory may be used again at once"


def test_a_ring_completes_its_oldest_holder_when_all_slots_are_in_flight(
    streams: RecordedStreams,
) -> None:
    ring = SlotRing(streams, torch.device("cpu"), depth=2, elastic=False)
    completed: list[str] = []

    def holder(name: str) -> Any:
        def complete() -> None:
            completed.append(name)
            slots[name].release("reduce")

        return SimpleNamespace(complete=complete)

    slots: dict[str, Slot] = {}
    for name in ("a", "b", "c"):
        slots[name] = acquired(ring, holder(name))
    assert completed == ["a"]


def test_an_elastic_ring_grows_instead_of_waiting(streams: RecordedStreams) -> None:
    ring = SlotRing(streams, torch.device("cpu"), depth=2, elastic=True)
    holder = SimpleNamespace(complete=lambda: pytest.fail("nobody should be completed"))
    assert len({id(acquired(ring, holder)) for _ in range(4)}) == 4
