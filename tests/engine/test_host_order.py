"""The host as one more party: it waits before it touches what the device still copies from or to
it.

And for nothing else: not in a step whose parameters all get gradients, and not while a backward is
launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from shardgrad import fully_shard
from shardgrad.engine.grad_group import GradGroup, grads_of
from shardgrad.engine.unit import unit_of
from shardgrad.sharding.offload import ShardMemory
from tests.support.recorded_streams import RecordedStreams


class _Copies(TorchDispatchMode):
    """Reports what the engine's copies read and write."""

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # On the compute stream nothing is copied between host and device.
        if op is torch.ops.aten.copy_.default and self._streams.current() != "compute":
            self._streams.access("copy reads", args[1], writes=False)
            self._streams.access("copy writes", args[0], writes=True)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedStreams]:
    """One rank on recorded streams whose shards live apart from where it computes."""
    recorded = RecordedStreams()
    monkeypatch.setattr("shardgrad.engine.comm_context.streams_for", lambda device: recorded)
    away = ShardMemory(torch.device("cpu"), is_offloaded=True)
    monkeypatch.setattr(ShardMemory, "of", classmethod(lambda cls, device, policy: away))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield recorded
    dist.destroy_process_group()


def offloaded() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    return fully_shard(model, offload_policy=CPUOffloadPolicy())


@contextmanager
def on_host(streams: RecordedStreams) -> Iterator[None]:
    """Accesses in this context are the host's; all that is launched later comes after them."""
    with streams.on("host"):
        yield
    done = streams.event()
    done.record("host")
    done.wait_on_host()


def touch_from_the_host(streams: RecordedStreams, model: nn.Module) -> None:
    """Does what an optimizer on the host does: reads gradients, writes parameters."""
    with on_host(streams):
        for module in model.modules():
            unit = unit_of(module)
            for group in unit.groups if unit is not None else ():
                streams.access("optimizer writes parameters", group.shard, writes=True)
                if (shard := grads_of(group).shard) is not None:
                    streams.access("optimizer reads gradients", shard.flat, writes=False)


def train(streams: RecordedStreams, *, micro_batches: int = 1) -> None:
    model = offloaded()
    with _Copies(streams):
        for _ in range(3):
            for micro in range(micro_batches):
                model.set_is_last_backward(micro == micro_batches - 1)
                model(torch.randn(4, 8)).sum().backward()
            touch_from_the_host(streams, model)
            for param in model.parameters():
                param.grad = None


def evaluate(streams: RecordedStreams) -> None:
    model = offloaded()
    with _Copies(streams), torch.no_grad():
        for _ in range(2):
            model(torch.randn(4, 8))
            touch_from_the_host(streams, model)


def gather_by_hand(streams: RecordedStreams) -> None:
    model = offloaded()
    with _Copies(streams):
        for layer in model:
            layer.unshard()
            layer.reshard()
        touch_from_the_host(streams, model)


def read_in_hooks(streams: RecordedStreams) -> None:
    model = offloaded()
    for param in model.parameters():

        def look(param: torch.Tensor) -> None:
            with on_host(streams):
                streams.access("hook reads gradient", param.grad._local_tensor, writes=False)

        param.register_post_accumulate_grad_hook(look)
    with _Copies(streams):
        model(torch.randn(4, 8)).sum().backward()


PROGRAMS = [train, evaluate, gather_by_hand, read_in_hooks]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_host_waits_before_it_touches_its_memory(
    streams: RecordedStreams, program: Callable[[RecordedStreams], None]
) -> None:
    program(streams)
    assert streams.hazards == []


def test_accumulated_gradients_are_ordered_too(streams: RecordedStreams) -> None:
    train(streams, micro_batches=2)
    assert streams.hazards == []


class Partly(nn.Linear):
    """A layer with a parameter that no rank ever uses."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.spare = nn.Parameter(torch.ones(3))


def _noted(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, what: str, notes: list[str]
) -> None:
    original = getattr(owner, method)

    def note(*args: Any, **kwargs: Any) -> Any:
        notes.append(what)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, note)


@pytest.mark.parametrize(("layer", "waits"), [(Partly, 3), (lambda: nn.Linear(8, 8), 0)])
def test_the_host_waits_only_for_flags_of_missed_parameters_once_a_backward_is_launched(
    monkeypatch: pytest.MonkeyPatch, layer: Callable[[], nn.Module], waits: int
) -> None:
    streams, notes = RecordedStreams(), []
    monkeypatch.setattr("shardgrad.engine.comm_context.streams_for", lambda device: streams)
    _noted(monkeypatch, GradGroup, "launch", "launched", notes)
    _noted(monkeypatch, type(streams.event()), "wait_on_host", "waited", notes)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(*(layer() for _ in range(3)))
    for child in model:
        fully_shard(child)
    fully_shard(model)
    for _ in range(3):
        model.zero_grad()
        notes.clear()
        model(torch.randn(4, 8)).sum().backward()
        assert notes == ["launched"] * 3 + ["waited"] * waits
        unused = [name for name, param in model.named_parameters() if param.grad is None]
        assert unused == [f"{number}.spare" for number in range(waits)]
    dist.destroy_process_group()
