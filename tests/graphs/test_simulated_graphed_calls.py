"""What a graphed step takes and gives, what it refuses, and how it looks at itself."""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint

import shardgrad
from shardgrad.engine.streams import is_capturing
from shardgrad.errors import (
    CaptureError,
    CollectiveError,
)
from shardgrad.graphs.reads import Reads
from shardgrad.graphs.step import UncapturableStepWarning
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import (
    VirtualRanks,
    on_virtual_ranks,
    one_at_a_time,
)
from tests.simulated.programs.graphed import (
    WIDTH,
    batch,
    build,
    loss_of,
    same_bits_as_eager,
    same_on,
    training_step,
)
from tests.support.graphed import (
    Graphed,
    Values,
    eager,
    require_replays,
    require_same,
    step_of,
    values_of,
)
from tests.support.processes import FairClock

# -- what a call may bring


@dataclass
class Batch:
    """A structure that the program has told torch's trees of."""

    x: Tensor
    scale: Tensor
    name: str = "text"


register_dataclass(Batch)


@same_bits_as_eager(1)
def test_inputs_are_copied_or_choose_a_graph(graphed: Graphed) -> Values:
    scale = torch.full((), 3.0, device=NAME)

    @graphed(warmup=1)
    def step(given: Any, fixed: Tensor, twice: bool, nothing: None, *, sign: float) -> Any:
        x, factor = given["batch"].x.to(NAME), given["batch"].scale
        out = (x * factor * fixed).copysign(sign)
        return {"out": out * 2 if twice else out, "none": nothing}

    # Two places the data may be in, two values of `twice`, two zeros: eight kinds of calls.
    for number in range(10):
        x = torch.full((3,), float(number), device="cpu" if number % 2 else NAME)
        given = {"batch": Batch(x, torch.full((), 2.0))}
        for twice in (False, True):
            scale.fill_(number + 1.0)
            yield step(given, scale, twice, None, sign=0.0 if number < 6 else -0.0)
    require_replays(step, 8, 20 - 8)


@same_bits_as_eager(1)
def test_a_batch_of_the_host_is_read_after_it_has_arrived(graphed: Graphed) -> Values:
    model = build()
    step = training_step(graphed, model)
    for number in range(5):
        sent = batch(number)
        # A graphed step sends it, the eager one is given it on the device.
        yield step(sent if graphed is eager else sent.cpu())
    require_replays(step, captures=1, replays=2)
    yield model


@on_virtual_ranks(1)
def test_outputs_are_overwritten_and_arguments_are_not_kept() -> None:
    @shardgrad.graphed_step(warmup=1)
    def step(x: Tensor) -> Tensor:
        return x * 2

    step(torch.ones(2, device=NAME))
    given = torch.ones(2, device=NAME)
    first, captured = step(given), weakref.ref(given)
    del given
    assert captured() is None
    second = step(torch.full((2,), 5.0, device=NAME))
    assert first.tolist() == second.tolist() == [10.0, 10.0]
    step.close()


@on_virtual_ranks(1)
def test_a_capture_finds_what_it_reads_and_writes_and_not_what_it_makes() -> None:
    stays, running, made = (torch.ones(2, device=NAME) for _ in range(3))
    held = [torch.ones(2, device=NAME)]

    def step() -> None:
        nonlocal made
        made = torch.arange(2.0, device=NAME)
        running.lerp_(stays * made, 0.1)
        held[0].mul_(2)

    pool = shardgrad.GraphPool()
    pool.follow()
    reads = Reads(step, [], [], pool, [], [], [])
    with pool.turn(), pool.capture([]) as graph, reads:
        step()
    assert {place.name for place in reads.places} == {"stays", "running", "held[0]"}
    held.clear()  # memory that is gone was not written
    ((name, written),) = reads.written()
    assert (name, written.data_ptr()) == ("running", running.data_ptr())
    pool.destroy(graph)


# -- what cannot be captured


def reads_on_the_host_from(graphed: Graphed, first: int) -> Values:
    model = build()
    step = training_step(graphed, model, on_uncapturable="eager")
    for number in range(7):
        if number == first:
            reads = model.register_forward_hook(lambda _, args, y: y * y.sum().item())
        if number == max(3, first) and graphed is not eager:
            with pytest.warns(shardgrad.UncapturableStepWarning, match="runs eagerly") as caught:
                loss = step(batch(number))
            assert caught[0].filename == __file__
            assert "it could not be captured: HostSync" in step.status()
        else:
            loss = step(batch(number))
        yield loss
    reads.remove()
    if graphed is not eager:
        assert (step.captures, step.replays) == ((1, 1) if first else (0, 0))
        step.reset()
    for number in range(7):
        yield step(batch(number))
    require_replays(step, 1, 4)
    yield model


@pytest.mark.parametrize("first", [0, 4])  # 4: when the captured step is captured again
def test_a_step_that_reads_on_the_host_goes_on_eagerly_and_says_so(first: int) -> None:
    same_on(1, reads_on_the_host_from, first)


def capture_fails_on_rank_1(policy: str) -> str:
    """Returns what the call ended with that rank 1 cannot capture."""
    model = build()

    def fail(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if dist.get_rank() == 1 and is_capturing(args[0].device):
            raise OnPurposeError

    model.register_forward_pre_hook(fail)
    step = training_step(shardgrad.graphed_step, model, on_uncapturable=policy)
    for number in range(3):
        step(batch(number))
    before = values_of([model])
    clock = FairClock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises((CaptureError, CollectiveError)) as caught:
            step(batch(3))
    assert clock.elapsed_s() < 10 * COLLECTIVE_TIMEOUT_S
    require_same(before, values_of([model]))
    while dist.get_rank() == 1 and not others_have_ended.wait(0.1):  # or they would hear of its end
        continue
    others_have_ended.set()
    step.close()
    return str(caught.value)


COLLECTIVE_TIMEOUT_S = 2.0
others_have_ended = threading.Event()


@pytest.mark.parametrize("policy", ["raise", "eager"])
def test_a_capture_that_fails_on_one_rank_ends_on_all_in_time(policy: str) -> None:
    others_have_ended.clear()
    found = VirtualRanks(2, COLLECTIVE_TIMEOUT_S).run(capture_fails_on_rank_1, policy)
    # With "eager", it runs eagerly what the other captures.
    of_capture = [each.startswith("step_of.<locals>.step could not be captured") for each in found]
    assert of_capture == [False, policy == "raise"]


def raises_its_own(grad: Tensor) -> Tensor:
    raise ValueError("bad batch")


def raises_as_torch_does(grad: Tensor) -> Tensor:
    raise RuntimeError("bad batch")


def reads_on_the_host(grad: Tensor) -> Tensor:
    return grad * grad.sum().item()


def failure_in_the_step(
    graphed: Graphed, half_way: bool, fail: Any, kind: type[Exception], says: str
) -> Values:
    """The function fails while it is captured, once; the call is repeated and trains as if nothing
    was. Its own exceptions pass through, but for what torch raises as well.
    """
    model = build()
    fails = False

    def fail_in_backward(module: nn.Module, args: Any, out: Tensor) -> None:
        if fails:
            out.register_hook(fail)
        if fails and not half_way:
            event = torch.Event(out.device)
            event.record()
            model.set_post_optim_event(event)

    (model[0] if half_way else model).register_forward_hook(fail_in_backward)
    step = training_step(graphed, model)
    for number in range(8):
        if number == 3 and graphed is not eager:
            fails, random = True, torch.get_device_module(NAME).get_rng_state()
            with pytest.raises(kind, match=says):
                step(batch(number))
            assert torch.equal(random, torch.get_device_module(NAME).get_rng_state())
            fails = False
        yield step(batch(number))
    passes = kind is ValueError
    require_replays(step, captures=int(passes), replays=5 * passes)
    yield model


@pytest.mark.parametrize(
    ("fail", "kind", "says"),
    [
        (raises_its_own, ValueError, "bad batch"),
        (raises_as_torch_does, CaptureError, "bad batch"),
        (
            reads_on_the_host,
            CaptureError,
            rf"(?s)could not be captured: HostSync.*{re.escape(__file__)}:\d+ in reads_on",
        ),
    ],
)
@pytest.mark.parametrize("half_way", [False, True])
def test_a_failure_inside_a_capture_leaves_the_step_to_be_repeated(
    half_way: bool, fail: Any, kind: type[Exception], says: str
) -> None:
    same_on(2, failure_in_the_step, half_way, fail, kind, says)


class OnPurposeError(RuntimeError):
    """Raised by a test."""


# -- tensors that a step closes over


@dataclass
class Held:
    """What a program keeps beside its step."""

    weight: Tensor


def replaced(graphed: Any, calls: Sequence[int], captures: int, replays: int) -> Values:
    model = build(1)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    held, gone = Held(torch.ones(WIDTH, device=NAME)), []
    taken = step_of(lambda x: (model(x) - x) * held.weight + empty.sum(), optimizer)
    step = graphed(model, optimizer, on_uncapturable="eager")(taken)
    for number in range(16):
        empty = torch.empty(0, device=NAME)  # nothing of it is read
        if number in calls:
            gone.append(held)  # so that its memory is not given to the next
            held = Held(torch.full((WIDTH,), number / 8, device=NAME))
        yield step(batch(number))
    require_replays(step, captures, replays)
    yield model


def test_a_tensor_that_is_replaced_now_and_then_is_another_graph() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardgrad.UncapturableStepWarning)
        same_on(2, replaced, (5, 10, 15), 4, 16 - 3)


@pytest.mark.parametrize(
    ("calls", "captures", "replays"), [(range(16), 3, 3), (range(5, 16), 4, 5)]
)
def test_a_tensor_that_is_replaced_before_each_call_is_named(
    calls: Sequence[int], captures: int, replays: int
) -> None:
    with pytest.warns(shardgrad.UncapturableStepWarning, match=r"in a row \[held\.weight"):
        same_on(2, replaced, calls, captures, replays)


class Criterion:
    """A loss whose parts the program may change between calls."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.mask = model, None
        self.weight, self.bounds, self.parts = 0.5, (0.0, 1.0), [torch.ones(WIDTH, device=NAME)]
        self.norms = {"weight.abs": 1.0}
        self.inner = Held(torch.ones(WIDTH, device=NAME))
        self.norm, self.inner.power, self.calls, self.epoch = torch.square, 1, 0, 0

    def shift(self, y: Tensor) -> Tensor:
        return sum(self.parts, y * 0) + sum(self.norms.values())

    def __call__(self, y: Tensor) -> Tensor:
        self.calls += 1
        total = y.clamp(*self.bounds) * self.weight + self.norm(y) ** self.inner.power
        return total + self.shift(y) * factor + (0 if self.mask is None else self.mask)

    def step(self, x: Tensor) -> Tensor:
        return self(self.model(x)).mean()

    def next_epoch(self) -> None:
        self.epoch += 1


def other_norm(y: Tensor) -> Tensor:
    return y.abs()


factor = 1.0
NOT_NAMED = "loss.next_epoch()"


@pytest.mark.parametrize(
    "change",
    [
        "loss.weight = 0.25",
        "loss.weight = loss.inner.weight",
        "here['factor'] = 0.5",
        "loss.bounds = 0.0, 0.5",
        "loss.mask = loss.inner.weight",
        "loss.parts.append(loss.inner.weight)",
        "loss.norms['weight.abs'] = 2.0",
        "loss.norms['more'] = 2.0",
        "loss.inner.power = 2",
        "loss.norm = here['other_norm']",
        "loss.norm = torch.abs",
        "model[1].momentum = 0.5",
        NOT_NAMED,
    ],
)
@same_bits_as_eager(1)
def test_what_the_steps_code_names_has_another_graph_when_it_changes(
    graphed: Graphed, change: str
) -> Values:
    """Except a number that changes at each call, and so cannot matter."""
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(NAME)
    here, loss = globals(), Criterion(model)
    step = graphed(model, warmup=1)(loss.step)
    for number in range(12):
        if number in (6, 7):  # the second time to what it was
            exec(change, {"here": here, "loss": loss, "model": model, "torch": torch})
        yield step(batch(number))
    yield list(model.buffers())
    here["factor"] = 1.0
    changes = int(change != NOT_NAMED)
    require_replays(step, 1 + changes, 11 - changes)


@on_virtual_ranks(1)
def test_what_is_new_differs_from_an_earlier_call_with_these_arguments() -> None:
    model = build(1)
    step = shardgrad.graphed_step(model)(lambda x, factor: model(x) * factor)
    for factor, trains in ((1, True), (2, False), (1, False)):
        model.train(trains)
        step(batch(0), factor)
    assert "('switches', True, True" in step.status(), step.status()


class Counted(shardgrad.graphs.Capturable):
    """What a program counts, which a capture must not change."""

    calls = 0

    def snapshot(self) -> Callable[[], None]:
        return partial(setattr, self, "calls", self.calls)


@on_virtual_ranks(1)
def test_gradients_that_are_kept_so_that_no_graph_is_replayed_are_warned_of() -> None:
    model, counted = build(1), Counted()

    @shardgrad.graphed_step(model, counted)
    def step(x: Tensor) -> list[Tensor | None]:
        counted.calls += 1
        model.zero_grad()
        loss_of(model, x).backward()
        return [p.grad for p in model.parameters()]

    def train() -> None:
        kept = []
        for number in range(16):
            kept = step(batch(number))
        assert kept
        assert counted.calls == 16

    with pytest.warns(shardgrad.UncapturableStepWarning, match="gradients of an earlier call"):
        train()
    assert "gradients of an earlier call" in step.status()
    step.reset()
    for number in range(8):
        step(batch(number))
    assert step.replays, "of those that are dropped"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (*range(1, 4), *range(5, 10)):  # that are new, with a replay after each
            step(batch(0, rows))
            step(batch(0))
    step.close()


class Watched(shardgrad.graphs.Capturable):
    """Notes whether a capture is under way when it is asked to complete its work."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def quiesce(self) -> None:
        self.asked.append(is_capturing(torch.device(NAME)))


@on_virtual_ranks(1)
def test_a_graph_begins_and_ends_with_nothing_in_flight() -> None:
    watched, dead = Watched(), []

    @shardgrad.graphed_step(watched, warmup=1)
    def step(x: Tensor) -> Tensor:
        if is_capturing(x.device):
            assert dead[-1]() is None
        return x * 2

    for _ in range(3):
        cycle = [torch.ones(2, device=NAME)]
        cycle.append(cycle)
        dead.append(weakref.ref(cycle[0]))
        del cycle
        step(torch.ones(2, device=NAME))
    assert watched.asked == [False, True, False] * 2, "before a capture, at its end, and after it"
    with mock.patch.object(torch.accelerator, "synchronize") as waits:
        step.reset()
    assert waits.called, "a graph was destroyed while it may be running"


@on_virtual_ranks(1)
def test_graphs_are_destroyed_before_the_process_group() -> None:
    @shardgrad.graphed_step(warmup=1)
    def step(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    for _ in range(3):
        step(torch.ones(2, device=NAME))
    assert step.captures == 1
    dist.destroy_process_group()
    with pytest.raises(CaptureError, match="closed"):
        step(torch.ones(2, device=NAME))
    dist.init_process_group("simulated", store=dist.HashStore(), rank=0, world_size=1)


# -- what is found before a capture


@on_virtual_ranks(1)
def test_a_number_that_a_replay_would_not_change_is_named() -> None:
    model = build()
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    calls = 0

    def scaled(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return model(x * calls)

    step = shardgrad.graphed_step(model, optimizer)(step_of(scaled, optimizer))
    for number in range(4):  # the capture is compared in the call after it
        step(batch(number))
    before = values_of([model])
    with pytest.raises(
        CaptureError, match=r"(?s)would be wrong as a graph.*calls changed from 3 to 4"
    ):
        step(batch(4))
    require_same(before, values_of([model]))
    step.close()


@on_virtual_ranks(1)
def test_memory_that_only_the_second_of_two_captures_writes_is_written_once() -> None:
    totals, calls = [torch.zeros(3, device=NAME) for _ in range(2)], 0

    @shardgrad.graphed_step(warmup=1, on_uncapturable="eager")
    def step(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        totals[calls % 2].add_(x)
        return x * 2

    x = torch.ones(3, device=NAME)
    step(x)
    step(x)
    with pytest.warns(UncapturableStepWarning, match="different values of"):
        step(x)
    step(x)
    assert [total.tolist() for total in totals] == [[2.0] * 3] * 2
    step.close()


def adversarial(graphed: Graphed) -> Values:
    """A layer of one of two models stands still while the other learns to deceive it, in one step,
    and has no gradients then.
    """
    forger, critic = build(), build(2)
    for block in (*forger, *critic):
        block.uses_spare = True
    forges = shardgrad.optim.AdamW(forger.parameters(), lr=0.01)
    judges = shardgrad.optim.AdamW(critic.parameters(), lr=0.01)

    @graphed(forger, critic, forges, judges)
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        judges.zero_grad()
        critic[0].first.requires_grad_(False)
        forges.zero_grad()
        forged = forger(x)
        deceived = critic(forged).square().mean()
        deceived.backward()
        forges.step()
        critic[0].first.requires_grad_(True)
        judged = (critic(forged.detach()) - critic(x)).square().mean()
        judged.backward()
        judges.step()
        return deceived, judged

    for number in range(8):
        yield step(batch(number))
    yield from (forger, critic)


@same_bits_as_eager(2)
def test_a_model_that_is_thawed_or_written_while_it_is_unsharded_is_the_same_step_again(
    graphed: Graphed,
) -> Values:
    """Nothing that it has computed while it was frozen has a backward, so it stays unsharded."""
    model, judge = build(), build(2)
    for block in (*model, *judge):
        block.uses_spare = True
    optimizer = shardgrad.optim.AdamW([*model.parameters(), *judge.parameters()], lr=1e-2)

    @graphed(model, judge, optimizer)
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x) + loss_of(judge, x)
        loss.backward()
        optimizer.step()
        judge.requires_grad_(False)
        judged = judge(x).square().mean()
        judge.requires_grad_(True)
        return loss + judged

    for number in range(8):
        judge[0].unshard()
        judge[0].first.weight.detach().mul_(0.9)
        yield step(batch(number))
    require_replays(step, 1, 5)
    judge.reshard()
    for block in judge:
        block.reshard()
    yield from (model, judge)


@on_virtual_ranks(1)
def test_a_layer_that_is_frozen_without_gradients_is_refused_by_name_and_trains_eagerly() -> None:
    with pytest.raises(
        CaptureError, match="without a gradient changed inside a graphed step"
    ) as caught:
        list(adversarial(shardgrad.graphed_step))
    assert (caught.value.where or "").startswith("parameter 0.first.weight and 1 more; ")
    assert (caught.value.fix or "").startswith("call zero_grad() after unfreezing")
    with pytest.warns(shardgrad.UncapturableStepWarning, match="runs eagerly"):
        seen = values_of(adversarial(partial(shardgrad.graphed_step, on_uncapturable="eager")))
    require_same(values_of(adversarial(eager)), seen)


@same_bits_as_eager(1)
def test_a_layer_that_is_thawed_in_a_refused_capture_trains_in_that_call(
    graphed: Graphed,
) -> Values:
    model = build(1)
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    taken = step_of(model, optimizer)

    @graphed(model, optimizer, on_uncapturable="eager")
    def step(x: Tensor) -> Tensor:
        for trains in (True, False):
            model[0].second.requires_grad_(trains)
            loss: Tensor = taken(x)
        return loss

    for number in range(5):
        yield step(batch(number))
    yield model


@same_bits_as_eager(1)
def test_a_layer_may_be_frozen_before_an_evaluation_and_the_next_training_call(
    graphed: Graphed,
) -> Values:
    model = build(1)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=0.01)
    taken = step_of(model, optimizer)

    @graphed(model, optimizer, warmup=1)
    def step(x: Tensor, trains: bool) -> Tensor:
        return taken(x) if trains else loss_of(model, x)

    for number in range(12):
        model[0].second.requires_grad_(number % 4 == 1)
        yield step(batch(number), number % 4 != 2)
    yield model


# -- several callers


@pytest.mark.parametrize("warmup", [8, 1], ids=["eager", "replayed"])
@on_virtual_ranks(1)
def test_an_output_is_not_written_over_while_its_caller_reads_it(warmup: int) -> None:
    """An output is read in the caller's stream and dropped; the next call is another stream's."""

    @shardgrad.graphed_step(warmup=warmup)
    def step(x: Tensor) -> Tensor:
        return x * 2

    x, places = torch.ones(2, device=NAME), [torch.Stream(NAME) for _ in range(2)]
    torch.accelerator.synchronize()
    with checked():
        for number in range(8):
            with places[number % 2]:
                step(x).add(1)
        torch.accelerator.synchronize()
    step.close()


# -- trust


@on_virtual_ranks(1)
def test_the_function_runs_for_two_captures_and_for_no_later_call() -> None:
    runs = 0

    @shardgrad.graphed_step(warmup=1)
    def step(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return x * 2

    for _ in range(2):
        for number in range(8):
            step(torch.ones(2 + number % 2, device=NAME))
        assert runs == 2 * (1 + 2), "for each shape an eager call, and two captures"
        step.reset()
        runs = 0
    step.close()


@on_virtual_ranks(1)
def test_a_region_that_saves_the_random_state_is_refused_where_graphs_cannot() -> None:
    model = build()
    model[0].forward = partial(checkpoint, model[0].forward, use_reentrant=False)
    step = training_step(shardgrad.graphed_step, model)
    # Where it is true, torch.utils.checkpoint saves the state of the device's random numbers.
    with mock.patch.object(torch.get_device_module(NAME), "_initialized", True, create=True):
        for number in range(3):
            step(batch(number))
        with pytest.raises(CaptureError, match="saves the RNG state") as caught:
            step(batch(4))
        step(batch(4))
    assert "graphed.py" in str(caught.value), "the line of the region is named"
    assert "preserve_rng_state=False" in str(caught.value)
    step.close()
