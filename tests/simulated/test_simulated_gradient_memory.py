"""Gradients that are None have no memory on a device, and nothing that a program does shows it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef

import shardgrad
from shardgrad.engine.buffers import Chunks, Slot, SlotRing
from shardgrad.engine.grad_group import GradGroup, grads_of
from shardgrad.engine.grad_shard import GradMemory, GradShard
from shardgrad.engine.param import managed_by
from shardgrad.engine.param_group import group_of
from shardgrad.engine.unit import units_under
from shardgrad.policies import GradientPolicy
from shardgrad.sharding import zero_copy
from tests.simulated.accelerator.device import NAME, Graph, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, on_virtual_ranks, one_at_a_time
from tests.simulated.programs.graphed import (
    Setup,
    batch,
    build,
    loss_of,
    same_on,
    weights,
)
from tests.support.graphed import Graphed, Values, require_replays

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "ours": lambda model: shardgrad.optim.AdamW(model.parameters(), lr=0.01),
    "torch's": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
}


def shards(model: nn.Module) -> list[GradShard]:
    groups = {
        group_of(managed): None
        for p in model.parameters()
        if (managed := managed_by(p)) is not None
    }
    return [shard for group in groups if (shard := grads_of(group).shard) is not None]


def states(model: nn.Module) -> set[GradMemory]:
    return {shard.memory for shard in shards(model)}


def at_the_loss(model: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Returns the bytes that are allocated when the loss is there, on this rank."""
    torch.accelerator.synchronize()
    loss = loss_of(model, x)
    return torch.get_device_module(NAME).memory_allocated(x.device), loss


def run_checked(ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Runs `function` on each rank; a hazard is an error."""

    def program() -> None:
        with checked():
            function(*args)

    VirtualRanks(ranks).run(program)


@contextmanager
def on_a_side_stream() -> Iterator[torch.Stream]:
    side = torch.Stream(NAME)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        yield side


# -- eager


def memory_of_a_step(name: str) -> tuple[int, int]:
    """Returns what gradients add to the memory that is allocated at the loss, and their own
    bytes.
    """
    gc.collect()  # what tests before this one have left would be freed in its midst
    model = build(Setup())
    optimizer = OPTIMIZERS[name](model)
    found: list[int] = []
    flats: dict[Tensor, None] = {}  # of all steps, in order
    for number in range(4):
        nbytes, loss = at_the_loss(model, batch(0))
        assert not any(flat.untyped_storage().nbytes() for flat in flats)
        loss.backward()
        flats.update(dict.fromkeys(shard.flat for shard in shards(model)))
        gradients = sum(flat.nbytes for flat in flats)
        shardgrad.clip_grad_norm_(model, 0.1)
        optimizer.step()
        if number < 3:
            optimizer.zero_grad()
            model.zero_grad()
        found.append(nbytes)
    kept, _ = at_the_loss(model, batch(0))  # of a step that begins with gradients
    # None was left to its views.
    assert list(map(id, flats)) == [id(shard.flat) for shard in shards(model)]
    return kept - found[-1], gradients


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_at_the_loss_nothing_is_left_of_gradients_that_are_none(name: str) -> None:
    for beyond, gradients in VirtualRanks(1).run(memory_of_a_step, name):
        assert beyond >= gradients > 0


@on_virtual_ranks(2, checks=True)
def test_memory_that_a_reduction_in_flight_writes_is_not_freed() -> None:
    """Gradients are set to None, and the next forward begins, while their reductions are in
    flight.
    """
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model, mesh = model.to(NAME), init_device_mesh(NAME, (dist.get_world_size(),))
    for module in (*model, model):
        shardgrad.fully_shard(module, mesh=mesh)
    for number in range(4):
        model.set_is_last_backward(number % 2 == 1)
        loss_of(model, batch(number)).backward()
        model.zero_grad()


@on_virtual_ranks(2, checks=True)
def test_staging_of_an_all_gather_in_flight_outlives_another_roots_backward() -> None:
    """A root is gathered while the backward of another ends, with which it shares its staging."""
    with one_at_a_time():
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2)]
    mesh = init_device_mesh(NAME, (dist.get_world_size(),))
    for model in models:
        for module in (*model.to(NAME), model):
            shardgrad.fully_shard(module, mesh=mesh)
    first, second = models
    shardgrad.share_comm_ctx(models)
    for number in range(2):
        loss = loss_of(first, batch(number))
        handle = second[0].unshard(async_op=True)
        loss.backward()
        handle.wait()
        loss_of(second, batch(number)).backward()


def kept_beside_another_stream(drops: bool) -> None:
    """The next forward runs on another stream, and frees; the program reads there, and may drop
    what it has kept; the first one goes on beside it, and allocates.
    """
    model = build(Setup(depth=1))
    with on_a_side_stream() as first:
        loss_of(model, batch(0)).backward()
        kept = model[0].first.weight.grad
        right = kept.to_local() * 2
        model.zero_grad()
    with on_a_side_stream() as second, torch.no_grad():
        second.wait_stream(first)
        model(batch(1))
        seen = kept.to_local() * 2
        kept = None if drops else kept
    with first:
        for shard in shards(model):  # where the freed memory was
            torch.full((shard.numel,), 7.0, device=NAME)
    torch.accelerator.current_stream().wait_stream(first)
    torch.accelerator.current_stream().wait_stream(second)
    assert torch.equal(seen, right)
    assert drops or torch.equal(kept.to_local() * 2, right)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_kept_stays_when_another_stream_frees_and_the_first_allocates(
    ranks: int, drops: bool
) -> None:
    run_checked(ranks, kept_beside_another_stream, drops)


@on_virtual_ranks(2, checks=True)
def test_what_is_kept_has_what_the_optimizers_stream_writes() -> None:
    """Gradients are scaled on the optimizer's stream, which the forward does not wait for, and
    kept.
    """
    model = build(Setup(depth=1))
    loss_of(model, batch(0)).backward()
    kept = model[0].first.weight.grad
    right = kept.to_local() * 2
    with on_a_side_stream() as side:
        kept.to_local().mul_(2)
        event = side.record_event()
    model.zero_grad()
    model.set_post_optim_event(event)
    with torch.no_grad():
        model(batch(1))
    torch.accelerator.current_stream().wait_event(event)
    assert torch.equal(kept.to_local(), right)


@pytest.mark.parametrize("stays", [False, True], ids=["freed", "left"])
def test_memory_that_is_let_go_comes_after_its_readers_on_another_stream(stays: bool) -> None:
    """Memory that stays from step to step is left when parameters get other places."""

    def reads_on_another_stream() -> None:
        model = build(Setup(options={"gradient_policy": GradientPolicy(persistent=stays)}))
        x = batch(0)  # a copy to the device, for which the host waits
        with on_a_side_stream() as first:
            loss_of(model, x).backward()
        with on_a_side_stream() as second:
            second.wait_stream(first)
            for _ in range(2):  # the first copies tables
                shardgrad.clip_grad_norm_(model, 0.1)
            model.zero_grad()
            model[0].first.requires_grad_(not stays)
            model(x)
        torch.accelerator.current_stream().wait_stream(second)

    run_checked(1, reads_on_another_stream)


@on_virtual_ranks(1)
def test_the_memory_of_gradients_of_layers_that_are_frozen_is_given_back() -> None:
    model = build(Setup())
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=0.01)

    def at_rest(number: int) -> int:
        nbytes, loss = at_the_loss(model, batch(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return nbytes

    before = [at_rest(number) for number in range(3)][-1]
    model[0].requires_grad_(False)
    at_rest(3)
    assert at_rest(4) <= before


def out_of_memory(failures: dict[int, int]) -> list[Tensor]:
    """In some steps the n-th allocation of gradients fails; the program takes the step again."""
    model, seen, left = build(Setup()), [], [0]
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=0.01)
    for shard in _shards_after_a_backward(model):
        allocate = shard.allocate

        def allocates(allocate: Any = allocate, shard: GradShard = shard, **options: Any) -> None:
            if left[0] and not shard.has_memory:
                left[0] -= 1
                if left[0] == 0:
                    raise torch.OutOfMemoryError
            allocate(**options)

        shard.allocate = allocates  # type: ignore[method-assign]
    for number in range(8):
        left[0] = failures.get(number, 0)
        try:
            loss_of(model, batch(number)).backward()
        except torch.OutOfMemoryError:
            model.zero_grad()
            loss_of(model, batch(number)).backward()
        seen += [p.grad.to_local().cpu() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _shards_after_a_backward(model: nn.Module) -> list[GradShard]:
    loss_of(model, batch(0)).backward()
    model.zero_grad()
    return shards(model)


@on_virtual_ranks(2)
def test_steps_that_ran_out_of_memory_for_gradients_leave_nothing_to_later_ones() -> None:
    assert all(map(torch.equal, out_of_memory({2: 1, 4: 2}), out_of_memory({})))


# -- graphs


def gradients_returned(graphed: Graphed) -> Values:
    model, kept = build(Setup()), {}

    @graphed(model)
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        loss_of(model, x).backward()
        found = model[0].first.bias.grad, model[1].first.weight.grad.to_local()
        kept["gradient"] = model[2].first.weight.grad
        model.zero_grad()
        return found

    seen = []
    for number in range(8):
        first, second = step(batch(number))
        seen += [first.to_local().cpu(), second.cpu(), kept["gradient"].to_local().cpu()]
    require_replays(step, 1, 5)
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_a_whole_step_returns_or_keeps_are_those_of_this_call(ranks: int) -> None:
    same_on(ranks, gradients_returned)


def surprised(graphed: Graphed) -> Values:
    """From some call on gradients are left, which the eager calls before did not tell."""
    model = build(Setup())
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    calls = 0

    @graphed(model, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        if calls < 4:
            optimizer.zero_grad()
        return loss

    seen = []
    for number in range(10):
        calls += 1
        seen.append(step(batch(number)).item())
        if number == 3 and isinstance(step, shardgrad.graphs.GraphedStep):
            assert (step.captures, step.eager_steps) == (0, 4)
            assert states(model) == {GradMemory.FIXED}
    if isinstance(step, shardgrad.graphs.GraphedStep):
        assert step.captures == 1
        step.close()
    return seen + weights(model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_capture_that_ends_with_unexpected_gradients_is_made_again_later(ranks: int) -> None:
    same_on(ranks, surprised)


def captured_by_torch(captured: bool, what: str) -> list[Any]:
    """A graph that `graphed_step` knows nothing of, and eager work between its replays."""
    model = build(Setup())
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        if what == "torch's update"
        else shardgrad.optim.SGD(model.parameters(), lr=0.1)
    )
    x, norm, seen, graph = batch(0), torch.zeros((), device=NAME), [], Graph()

    def backward() -> None:
        if what == "gradients":
            model.zero_grad()  # a replay overwrites them anyway
        loss_of(model, x).backward()

    parts: list[tuple[bool, Callable[[], Any]]] = [(what in ("whole", "gradients"), backward)]
    if what == "second backward":
        parts.append((True, backward))
    if what in ("whole", "norm"):
        parts.append((True, lambda: norm.copy_(shardgrad.clip_grad_norm_(model, math.inf))))
    parts.append((what in ("whole", "update", "torch's update"), lambda: optimizer.step()))
    if what != "gradients":
        parts.append((what == "whole", lambda: optimizer.zero_grad()))
    first = [inside for inside, _ in parts].index(True)

    def captured_parts() -> None:
        for inside, part in parts:
            if inside:
                part()

    with on_a_side_stream() as side:
        for number in range(8):
            x.copy_(batch(number))
            for place, (inside, part) in enumerate(parts):
                if not inside or not captured or number in (0, 1, 5):
                    part()
                elif place == first:
                    if number == 2:
                        with graph.capture(side):
                            captured_parts()
                    graph.replay()
            seen += [*weights(model), norm.cpu()]
    return seen


@pytest.mark.parametrize(
    "what", ["whole", "gradients", "second backward", "norm", "update", "torch's update"]
)
@on_virtual_ranks(2, checks=True)
def test_a_graph_of_the_programs_own_finds_gradients_where_they_were(what: str) -> None:
    assert all(map(torch.equal, captured_by_torch(False, what), captured_by_torch(True, what)))


class Used(nn.Linear):
    """A layer that may be passed by."""

    is_used = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_used else x * 1.0


def used_by_one_rank(captured: bool) -> list[Tensor]:
    """Each rank uses a layer of its own in two backwards, and all had used them until then."""
    with one_at_a_time():
        torch.manual_seed(0)
        layers = [Used(4, 4) for _ in range(3)]
        model = nn.Sequential(nn.Linear(4, 4), *layers).to(NAME)
    for layer in (*layers, model):
        shardgrad.fully_shard(layer, mesh=init_device_mesh(NAME, (2,)))
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    x, graph = torch.ones(2, 4, device=NAME), Graph()

    def step() -> None:
        for _ in range(2):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with on_a_side_stream() as side:
        for uses in ({0, 1}, {dist.get_rank()}):
            for place, layer in enumerate(layers):
                layer.is_used = place in uses
            with graph.capture(side) if captured and len(uses) == 1 else nullcontext():
                step()
        if captured:
            graph.replay()
        return weights(model)


@on_virtual_ranks(2, checks=True)
def test_a_graph_adds_to_what_another_rank_alone_has_used_in_it() -> None:
    """No eager step has told this rank: the flags on the device do, at each replay."""
    assert all(map(torch.equal, used_by_one_rank(False), used_by_one_rank(True)))


# -- gradients on their way


WIDE = 32


class _Wide(nn.Module):
    """Layers whose weights are sent without a copy, behind a parameter of the root's that is
    larger.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * WIDE, WIDE, bias=False)
        self.layers = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x))


def wide_steps(dtype: torch.dtype | None) -> int:
    """Returns the `id` of the ring that lends staging of reductions."""
    with one_at_a_time():
        torch.manual_seed(0)
        model = _Wide()
    model, mesh = model.to(NAME), init_device_mesh(NAME, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        shardgrad.fully_shard(module, mesh=mesh, mp_policy=policy)
    for _ in range(3):
        model(torch.ones(2, 3 * WIDE, device=NAME)).sum().backward()
        model.zero_grad()
    context = units_under(model)[0].context
    assert context is not None
    return id(context.comm_ctx.reduce_ring)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_whole_gradients_are_there_of_two_groups_and_staging_of_the_largest(
    dtype: torch.dtype | None,
) -> None:
    arrived: dict[torch.device, list[StorageWeakRef]] = {}
    alive: list[int] = []
    # Ring, bytes of all its slots, and of the one that it lends.
    staged: list[tuple[int, int, int]] = []
    take, lend = GradGroup.take, SlotRing.take

    def counting(self: GradGroup, unsharded: Any, grad: Tensor, *args: Any, **kwargs: Any) -> bool:
        here = arrived.setdefault(grad.device, [])
        here.append(StorageWeakRef(grad.untyped_storage()))
        alive.append(sum(not each.expired() for each in here))
        return take(self, unsharded, grad, *args, **kwargs)

    def measured(self: SlotRing, *args: Any) -> tuple[Slot, list[Chunks]]:
        slot, pieces = lend(self, *args)
        staged.append((id(self), sum(each.nbytes for each in self.slots), slot.nbytes))
        return slot, pieces

    with (
        pytest.MonkeyPatch.context() as patch
    ):  # here: a fixture's would stay in the process of these tests
        patch.setattr(zero_copy, "ZERO_COPY_NBYTES", WIDE * WIDE)
        patch.setattr(GradGroup, "take", counting)
        patch.setattr(SlotRing, "take", measured)
        rings = VirtualRanks(2).run(wide_steps, dtype)
    assert max(alive) <= 2
    for ring in rings:
        lent = [(all_slots, one) for of, all_slots, one in staged if of == ring]
        largest = max(one for _, one in lent)
        assert {all_slots for all_slots, one in lent if one == largest} == {largest}
