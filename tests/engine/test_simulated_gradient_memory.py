"""Gradients that are None have no memory on a device, and nothing that a program does shows it."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef

import shardgrad
from shardgrad.engine.buffers import Chunks, Slot
from shardgrad.engine.grad_shard import GradMemory, GradShard
from shardgrad.engine.unit import units_under
from shardgrad.policies import GradientPolicy
from shardgrad.sharding import zero_copy
from tests.simulated.accelerator.device import NAME, Graph, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, on_virtual_ranks, one_at_a_time
from tests.simulated.programs.graphed import (
    batch,
    build,
    loss_of,
    same_on,
)
from tests.support.graphed import Graphed, Values, require_replays, require_same, values_of


def shards(model: nn.Module) -> list[GradShard]:
    groups = [grads for unit in units_under(model) for grads in unit.grad_groups]
    return [grads.shard for grads in groups if grads.shard is not None]


def at_the_loss(model: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """Returns the bytes that are allocated when the loss is there, on this rank."""
    torch.accelerator.synchronize()
    loss = loss_of(model, x)
    return torch.get_device_module(NAME).memory_allocated(x.device), loss


@contextmanager
def on_a_side_stream() -> Iterator[torch.Stream]:
    side = torch.Stream(NAME)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        yield side


# -- eager


@pytest.mark.parametrize("kind", [shardgrad.optim.AdamW, partial(torch.optim.AdamW, foreach=True)])
@on_virtual_ranks(1)
def test_at_the_loss_nothing_is_left_of_gradients_that_are_none(kind: Any) -> None:
    gc.collect()  # what tests before this one have left would be freed in its midst
    model = build()
    optimizer = kind(model.parameters(), lr=0.01)
    flats: dict[Tensor, None] = {}  # of all steps, in order
    for number in range(4):
        without, loss = at_the_loss(model, batch(0))
        assert not any(flat.untyped_storage().nbytes() for flat in flats)
        loss.backward()
        flats.update(dict.fromkeys(shard.flat for shard in shards(model)))
        gradients = sum(flat.nbytes for flat in flats)
        shardgrad.clip_grad_norm_(model, 0.1)
        optimizer.step()
        if number < 3:
            optimizer.zero_grad()
            model.zero_grad()
    kept, _ = at_the_loss(model, batch(0))  # of a step that begins with gradients
    # None was left to its views.
    assert list(map(id, flats)) == [id(shard.flat) for shard in shards(model)]
    assert kept - without >= gradients > 0


@on_virtual_ranks(2, checks=True)
def test_staging_of_an_all_gather_in_flight_outlives_another_roots_backward() -> None:
    """A root is gathered while the backward of another ends, with which it shares its staging."""
    first, second = build(2), build(2)
    shardgrad.share_comm_ctx([first, second])
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
    model = build(1)
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
            torch.full((shard.layout.tail_offset,), 7.0, device=NAME)
    torch.accelerator.current_stream().wait_stream(first)
    torch.accelerator.current_stream().wait_stream(second)
    assert torch.equal(seen, right)
    assert drops or torch.equal(kept.to_local() * 2, right)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_kept_stays_when_another_stream_frees_and_the_first_allocates(
    ranks: int, drops: bool
) -> None:
    with checked():
        VirtualRanks(ranks).run(kept_beside_another_stream, drops)


@on_virtual_ranks(2, checks=True)
def test_what_is_kept_has_what_the_optimizers_stream_writes() -> None:
    """Gradients are scaled on the optimizer's stream, which the forward does not wait for, and
    kept.
    """
    model = build(1)
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
@on_virtual_ranks(1, checks=True)
def test_memory_that_is_let_go_comes_after_its_readers_on_another_stream(stays: bool) -> None:
    """Memory that stays from step to step is left when parameters get other places."""
    model = build(gradient_policy=GradientPolicy(persistent=stays))
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


@on_virtual_ranks(1)
def test_the_memory_of_gradients_of_layers_that_are_frozen_is_given_back() -> None:
    model = build()
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=0.01)

    def at_rest() -> int:
        nbytes, loss = at_the_loss(model, batch(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return nbytes

    before = [at_rest() for _ in range(3)]
    model[0].requires_grad_(False)
    at_rest()
    assert at_rest() <= before[-1]


def out_of_memory(failures: dict[int, int]) -> Values:
    """In some steps the n-th allocation of gradients fails; the program takes the step again."""
    model, left = build(), [0]
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=0.01)
    loss_of(model, batch(0)).backward()
    model.zero_grad()
    for shard in shards(model):
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
        yield [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()


@on_virtual_ranks(2)
def test_steps_that_ran_out_of_memory_for_gradients_leave_nothing_to_later_ones() -> None:
    require_same(values_of(out_of_memory({})), values_of(out_of_memory({2: 1, 4: 2})))


# -- graphs


def gradients_returned(graphed: Graphed) -> Values:
    model, kept = build(), {}

    @graphed(model)
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        loss_of(model, x).backward()
        found = model[0].first.bias.grad, model[1].first.weight.grad.to_local()
        kept["gradient"] = model[2].first.weight.grad
        model.zero_grad()
        return found

    for number in range(8):
        yield step(batch(number)), kept
    require_replays(step, 1, 5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_a_whole_step_returns_or_keeps_are_those_of_this_call(ranks: int) -> None:
    same_on(ranks, gradients_returned)


def surprised(graphed: Graphed) -> Values:
    """From some call on gradients are left, which the eager calls before did not tell."""
    model = build()
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

    for number in range(10):
        calls += 1
        yield step(batch(number))
        if number == 3 and isinstance(step, shardgrad.graphs.GraphedStep):
            assert (step.captures, step.eager_steps) == (0, 4)
            assert {shard.memory for shard in shards(model)} == {GradMemory.FIXED}
    assert not isinstance(step, shardgrad.graphs.GraphedStep) or step.captures == 1
    yield model


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_capture_that_ends_with_unexpected_gradients_is_made_again_later(ranks: int) -> None:
    same_on(ranks, surprised)


def captured_by_torch(captured: bool, kind: Any, what: str) -> Values:
    """A graph that `graphed_step` knows nothing of, and eager work around its replays."""
    model = build()
    optimizer = kind(model.parameters(), lr=0.1)
    x, norm, graph = batch(0), torch.zeros((), device=NAME), Graph()
    parts: dict[str, Callable[[], object]] = {
        "zero": model.zero_grad,
        "backward": lambda: loss_of(model, x).backward(),
        "norm": lambda: norm.copy_(shardgrad.clip_grad_norm_(model, math.inf)),
        "step": optimizer.step,
    }

    def run(names: str) -> None:
        for name in names.split():
            parts[name]()

    before, inside, after = re.split(r"[\[\]]", what)
    with on_a_side_stream() as side:
        for number in range(8):
            x.copy_(batch(number))
            run(before)
            if number in (0, 1, 5) or not captured:
                run(inside)
            else:
                if number == 2:
                    with graph.capture(side):
                        run(inside)
                graph.replay()
            run(after)
            yield model, norm


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("[backward norm step zero]", shardgrad.optim.SGD),
        ("[zero backward] step", shardgrad.optim.SGD),  # a replay overwrites them anyway
        ("backward [backward] step zero", shardgrad.optim.SGD),
        ("backward [norm] step zero", shardgrad.optim.SGD),
        ("backward [step] zero", shardgrad.optim.SGD),
        ("backward [step] zero", torch.optim.SGD),
    ],
)
@on_virtual_ranks(2, checks=True)
def test_a_graph_of_the_programs_own_finds_gradients_where_they_were(what: str, kind: Any) -> None:
    runs = (values_of(captured_by_torch(captured, kind, what)) for captured in (False, True))
    require_same(*runs)


class Used(nn.Linear):
    """A layer that may be passed by."""

    is_used = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_used else x * 1.0


def used_by_one_rank(captured: bool) -> Values:
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
        yield model


@on_virtual_ranks(2, checks=True)
def test_a_graph_adds_to_what_another_rank_alone_has_used_in_it() -> None:
    """No eager step has told this rank: the flags on the device do, at each replay."""
    require_same(values_of(used_by_one_rank(False)), values_of(used_by_one_rank(True)))


# -- gradients on their way


WIDE = 32


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@mock.patch.object(zero_copy, "ZERO_COPY_NBYTES", WIDE * WIDE)
@on_virtual_ranks(2)
def test_whole_gradients_are_there_of_two_groups_and_staging_of_the_largest(
    dtype: torch.dtype | None,
) -> None:
    """Weights are sent without a copy, behind a parameter of the root's that is larger."""
    with one_at_a_time():
        torch.manual_seed(0)
        layers = [nn.Linear(WIDE, WIDE, bias=False) for _ in range(6)]
        model = nn.Sequential(nn.Linear(3 * WIDE, WIDE, bias=False), *layers).to(NAME)
    mesh = init_device_mesh(NAME, (dist.get_world_size(),))
    for module in (*layers, model):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        shardgrad.fully_shard(module, mesh=mesh, mp_policy=policy)
    x = torch.ones(2, 3 * WIDE, device=NAME)
    with torch.no_grad():
        model(x)  # makes what lends staging
    arrived: list[StorageWeakRef] = []
    lent: list[tuple[int, int]] = []  # bytes of a slot, and of all

    def taken(take: Any, unsharded: Any, grad: Tensor, *args: Any, **kwargs: Any) -> bool:
        arrived.append(StorageWeakRef(grad.untyped_storage()))
        assert sum(not each.expired() for each in arrived) <= 2
        # The root's comes last, and beside it is the staging of one group that is being sent.
        assert grad.shape[1] == WIDE or sum(each.nbytes > 0 for each in ring.slots) == 1
        return take(unsharded, grad, *args, **kwargs)

    def lends(ring: Any, take: Any, *args: Any) -> tuple[Slot, list[Chunks]]:
        slot, pieces = take(*args)
        lent.append((slot.nbytes, sum(each.nbytes for each in ring.slots)))
        return slot, pieces

    context: Any = units_under(model)[0].context
    ring = context.comm_ctx.reduce_ring
    ring.take = partial(lends, ring, ring.take)
    for unit in units_under(model):
        for grads in unit.grad_groups:
            grads.take = partial(taken, grads.take)
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
    largest, _ = max(lent)
    assert {of_all for one, of_all in lent if one == largest} == {largest}
