"""Whole training steps as one graph of a real device: the same bits as eager, on one rank.

On a machine with a GPU: `make test ARGS="tests/gpu"`; without one `make test-cuda`. What a graph
does with more ranks is shown by tests/graphs/test_simulated_*.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardgrad
from shardgrad.errors import CaptureError, ReplayMismatchError
from shardgrad.graphs import GraphedStep
from shardgrad.graphs.capturable import OptimizerState
from shardgrad.graphs.inputs import InputBuffers
from shardgrad.graphs.outputs import plain_tensors
from tests.cuda_runtime import inspection
from tests.support.gpu import ON_A_GPU
from tests.support.graphed import (
    Graphed,
    Values,
    on_one_gpu,
    require_replays,
    same_bits_as_eager,
    step_of,
)
from tests.support.tensor_extensions import Blocked, Narrowed, Scaled, extended

pytestmark = ON_A_GPU
WIDTH = 64
STEPS, WARMUP = 20, 3


@pytest.fixture
def device(one_rank: None) -> torch.device:
    return torch.device("cuda")


class Block(nn.Module):
    """Two layers, and a third one that nothing uses."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.spare = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.second(torch.tanh(self.first(x))))


def build(*, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)  # also of what dropout draws
    return on_one_gpu(nn.Sequential(*(Block(dropout) for _ in range(3))))


def batch(number: int, where: torch.device) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number)).to(where)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.flip(0)).square().mean()


@same_bits_as_eager
def test_dropout_of_recomputed_layers_is_that_of_eager(
    graphed: Graphed, device: torch.device
) -> Values:
    """Layers with dropout are computed again in backward, one inside of another region, and all of
    them twice for the second loss. The host reads the first loss before its backward.
    """
    model = build(dropout=0.5)
    first, second, last = model
    for block, reentrant in ((first, False), (last, True)):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
    second.forward = _with_another_region(second)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    log: list[float] = []

    def loss_of(x: Tensor) -> Tensor:
        x = F.dropout(model(x), 0.5)
        x = checkpoint(lambda y: (y * torch.rand_like(y)).exp(), x, use_reentrant=False)
        return x.square().mean()

    @graphed(model, optimizer, warmup=WARMUP)
    def step(x: Tensor) -> Tensor:
        loss = loss_of(x)
        shardgrad.graphs.outside(lambda value: log.append(value.item()), loss)
        loss.backward()
        loss = loss_of(x.flip(0))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number in range(STEPS):
        if number == 9:
            torch.manual_seed(1)
        step(batch(number, device))
    require_replays(step, 1, STEPS - WARMUP)
    yield from (log, model)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["", "kept"])
@pytest.mark.parametrize("kind", [Narrowed, Scaled, Blocked])
@same_bits_as_eager
def test_weights_with_all_gather_extensions_are_captured(
    graphed: Graphed, device: torch.device, kind: type[Narrowed], options: dict[str, Any]
) -> Values:
    """They send another dtype, and have scales of their own for each step, as torchao's float8
    weights or MXFP8. On one rank the chunk is read where it is filled; a scale is read on another
    stream than it is computed on.
    """
    torch.manual_seed(0)
    model = on_one_gpu(extended(kind, WIDTH, 96, WIDTH), **options)
    rate = torch.tensor(1e-2, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
    step = graphed(model, optimizer, warmup=WARMUP)(step_of(model, optimizer, 1.0))
    with inspection.late_and_ordered():
        losses = [step(batch(number, device)) + 0.0 for number in range(STEPS)]
    require_replays(step, 1, STEPS - WARMUP)
    yield losses, list(plain_tensors(p.to_local().detach() for p in model.parameters()))


def writes_its_result_of_before(
    model: nn.Module, x: Tensor, state: Tensor, received: Tensor
) -> tuple[Tensor, ...]:
    """As a collective does another argument."""
    state.mul_(0.5)
    dist.all_gather_into_tensor(received, x + received)
    return (model(x) + state,)


def returns_them_in_the_other_order(
    model: nn.Module, x: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, ...]:
    first.add_(model(x))
    return second, first


def fills_a_cache(model: nn.Module, x: Tensor, output: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    """A decoder's step."""
    cache.copy_(cache.roll(1, 0))
    cache[0].copy_(x[0])
    return (model(x + cache),)


@pytest.mark.parametrize(
    ("function", "mode"),
    [
        (writes_its_result_of_before, torch.no_grad),
        (returns_them_in_the_other_order, torch.no_grad),
        (fills_a_cache, torch.inference_mode),
    ],
)
@same_bits_as_eager
def test_what_a_step_writes_into_its_arguments_is_there_after_it(
    graphed: Graphed, device: torch.device, function: Callable[..., Any], mode: Callable[[], Any]
) -> Values:
    """What a call returns are the first arguments of the next."""
    model = build()
    step = graphed(model, warmup=WARMUP)(functools.partial(function, model))
    with mode():
        given = [torch.zeros(16, WIDTH, device=device), torch.ones(16, WIDTH, device=device)]
        for number in range(STEPS):
            returned = step(batch(number, device), *given)
            given[: len(returned)] = returned
            yield given
    require_replays(step, 1, STEPS - WARMUP)


@same_bits_as_eager
def test_tensors_that_a_step_leaves_in_attributes_are_those_of_the_latest_call(
    graphed: Graphed, device: torch.device
) -> Values:
    """The log has a graph's loss, and after it that of another graph; then the program drops it.
    Each call writes one of two tensors, and exchanges them.
    """
    model, log = build(), dict[str, Tensor]()
    turns = [tuple(torch.arange(2.0, device=device))]
    model[0].register_forward_hook(lambda unit, _, output: setattr(unit, "scale", output.norm()))

    @graphed(model, warmup=WARMUP)
    def step(x: Tensor) -> None:
        loss = loss_of(model, x)
        log["loss"], log["batch"] = loss.detach(), x
        turns[0] = turns[0][::-1]
        turns[0][0].add_(log["loss"])
        loss.backward()
        model.zero_grad()

    for number in range(STEPS):
        step(batch(number, device)[number // 3 % 2 :])
        yield log, model[0].scale, turns
        if number % 3 == 0:
            log.clear()
            model.to(device)  # in which torch exchanges DTensors


def _with_another_region(block: Any) -> Callable[[Tensor], Tensor]:
    """Returns a block's forward as a region of which a part is one, too."""
    inner = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return lambda x: checkpoint(lambda y: F.dropout(inner(y), 0.2), x, use_reentrant=False)


def test_a_region_outside_of_steps_draws_again_what_it_drew(device: torch.device) -> None:
    x = torch.ones(16, WIDTH, device=device, requires_grad=True)
    shardgrad.graphed_step()(torch.square)(x.detach())  # has replaced functions of torch

    def gradient(layer: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        loss = F.dropout(layer(F.dropout(x, 0.2)), 0.2).sum()
        return torch.autograd.grad(loss, x)[0]

    def layer(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).square()

    region = functools.partial(checkpoint, layer, use_reentrant=False)
    assert torch.equal(gradient(region), gradient(layer))


def test_what_a_capture_froze_in_such_weights_is_named(device: torch.device) -> None:
    model = on_one_gpu(extended(Narrowed, WIDTH, WIDTH))
    calls = itertools.count(1)

    @shardgrad.graphed_step(model, warmup=1)
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        with torch.no_grad():
            next(model.parameters()).mul_(1 / next(calls))
        return loss

    with pytest.raises(CaptureError, match=r"it computed different values of shard of 0\.weight"):
        list(map(step, (batch(number, device) for number in range(WARMUP + 2))))


def test_a_step_that_would_draw_other_numbers_raises_in_the_first_replay(
    device: torch.device,
) -> None:
    generator = torch.Generator(device)

    @shardgrad.graphed_step(generator)
    def step(x: Tensor) -> Tensor:
        x = x * torch.rand((), device=device, generator=generator)
        generator.manual_seed(3)  # which a replay does not do
        return x

    for number in range(WARMUP):
        step(batch(number, device))
    with pytest.raises(ReplayMismatchError, match="more or fewer random numbers"):
        step(batch(2, device))


@pytest.mark.parametrize("reads", [True, False])
@same_bits_as_eager
def test_what_a_capture_that_fails_has_gathered_and_drawn_is_so_again(
    graphed: Graphed, device: torch.device, reads: bool
) -> Values:
    """Nothing of a capture has run, and the units would stay unsharded for backward. Unless it
    reads, the comparison fails for what the host has drawn.
    """
    model, generator = build(), torch.Generator()
    model.set_reshard_after_forward(False)
    optimizer = shardgrad.optim.SGD(model.parameters(), 0.1)

    def read(x: Tensor) -> Tensor:
        x = model(x) * sum(torch.rand((), generator=each).item() for each in (generator, None))
        if reads:
            x.sum().item()
        return x

    decorate = graphed(model, optimizer, generator, on_uncapturable="eager")
    step = decorate(step_of(read, optimizer))
    for number in range(8):
        yield step(batch(number, device))


def test_what_runs_outside_of_the_graphs_draws_as_it_likes(device: torch.device) -> None:
    counts = itertools.count()

    @shardgrad.graphed_step(warmup=1)
    def step(x: Tensor) -> Tensor:
        shardgrad.graphs.outside(
            lambda: [torch.rand(1, device=device) for _ in range(next(counts))]
        )
        return F.dropout(x)

    for number in range(WARMUP + 2):
        step(batch(number, device))


def test_pools_of_a_thread_share_a_stream_and_its_cublas_workspace(device: torch.device) -> None:
    held = []
    for _ in range(3):
        step = shardgrad.graphed_step(warmup=1)(lambda x: x @ x)
        for number in range(4):
            step(batch(number, device).square().sum() * torch.eye(2, device=device))
        step.close()
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == [held[0]] * 2
    lent = {torch.cuda.Stream().cuda_stream for _ in range(40)}  # torch has 32
    assert step.pool.stream.native_handle not in lent, "a program may launch into its captures"


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pinned_batch_is_sent_from_where_it_is(device: torch.device, pinned: bool) -> None:
    sources = [torch.arange(6.0).view(2, 3), torch.ones(5, dtype=torch.int64)]
    sources = [source.pin_memory() for source in sources] if pinned else sources
    step = shardgrad.graphed_step(warmup=1)(lambda given: [x * 1 for x in given])
    staged, were_copied = InputBuffers._staged, []

    def noted(self: InputBuffers, given: Tensor) -> Tensor:
        were_copied.append((found := staged(self, given)) is not given)
        return found

    with patch.object(InputBuffers, "_staged", noted):
        sent = [step(sources) for _ in range(3)][-1]
    assert [torch.equal(x.cpu(), source) for x, source in zip(sent, sources, strict=True)] == [1, 1]
    assert set(were_copied) == {not pinned}


def graphed_training(model: nn.Module) -> GraphedStep[[Tensor], Tensor]:
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    return shardgrad.graphed_step(model, optimizer, warmup=WARMUP)(step_of(model, optimizer))


@same_bits_as_eager
def test_steps_of_one_pool_are_reset_closed_and_captured_again(
    graphed: Graphed, device: torch.device
) -> Values:
    model, pool = build(), shardgrad.graphs.GraphPool(device)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    taken = step_of(model, optimizer)
    decorate = graphed(model, optimizer, warmup=2, pool=pool)
    forgotten = decorate(taken)
    for number in range(4):
        yield forgotten(batch(number, device))
    del forgotten  # and with it the pool's only graph
    first, second, third = (decorate(taken) for _ in range(3))
    for number, step in enumerate([first] * 4 + [second] * 6 + [first] * 4 + [third] * 4):
        if number == 8 and isinstance(first, GraphedStep):
            first.reset()
        if number == 14:
            require_replays(first, 1, 2)
        yield step(batch(number, device))
    require_replays(third, 1, 2)


def test_a_second_capture_and_the_comparison_take_no_more_memory(device: torch.device) -> None:
    # Activations and state have segments of their own, and do not fit beside each other.
    model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(3))).to(device)
    shardgrad.fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    step = graphed_training(model)

    held, peaks = [], []
    for _ in range(WARMUP + 3):
        step(torch.ones(2048, 768, device=device))
        held.append((step.pool.nbytes, torch.cuda.memory_reserved()))
        peaks.append(torch.cuda.max_memory_reserved())
    assert held[WARMUP + 1 :] == [held[WARMUP]] * 2
    assert peaks[WARMUP + 1 :] == [peaks[WARMUP]] * 2  # nor do copies of the state raise the peak
    assert (step.captures, step.replays) == (1, 3)


def test_a_replayed_step_returns_before_the_device_is_done(device: torch.device) -> None:
    """With the device busy, calls go on: input copies do not make the host wait."""
    step = graphed_training(build())

    for number in range(WARMUP + 2):
        step(batch(number, device))
    data = [batch(number, device) for number in range(3)]
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    busy = torch.cuda.Event()
    busy.record()
    for x in data:
        step(x)
    assert not busy.query(), "a replayed step made the host wait for the device"


def python_calls_of_a_replay(layers: int, device: torch.device) -> int:
    plain, sharded = (nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)]) for _ in range(2))
    model = nn.Sequential(plain.to(device), on_one_gpu(sharded))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, capturable=True, foreach=False)

    @shardgrad.graphed_step(model, optimizer)
    def step(x: Tensor) -> None:
        loss_of(model, x).backward()
        shardgrad.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    events, x = [], torch.ones(2, 4, device=device)
    for _ in range(WARMUP + 2):
        step(x)
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        step(x)
    finally:
        sys.setprofile(None)
    assert (step.captures, step.replays) == (1, 3)
    return events.count("call")


def test_a_replay_runs_no_python_for_each_parameter_or_unit(device: torch.device) -> None:
    """Neither of a plain model, nor of an optimizer's states, nor of a list that is clipped."""
    assert python_calls_of_a_replay(20, device) == python_calls_of_a_replay(2, device)


@pytest.mark.parametrize("where", ["closure", "buffer", "learning rate"])
@same_bits_as_eager
def test_a_number_that_changes_in_a_tensor_of_the_host_is_another_graph(
    graphed: Graphed, device: torch.device, where: str
) -> Values:
    """A number in a tensor of the host changes in place long after it was captured."""
    model, tempered, rate = build(), nn.Module(), torch.tensor(0.1)
    tempered.register_buffer("scale", torch.tensor(1.0))  # of a module that nobody shards
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    number = {"closure": torch.tensor(1.0), "buffer": tempered.scale, "learning rate": rate}[where]
    factor = tempered.scale if where == "buffer" else torch.tensor(1.0)
    factor = number if where == "closure" else factor

    @graphed(model, tempered, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x) * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for call in range(STEPS):
        if call in (8, 14):
            number.mul_(0.5)
        yield step(batch(call, device))
    eager = 2 if where == "learning rate" else 0  # guards have to be seen in an eager call
    require_replays(step, 3, STEPS - WARMUP - eager)
    yield model


def test_the_numbers_of_an_optimizer_are_not_read_on_the_device(device: torch.device) -> None:
    model = build()
    betas = torch.tensor(0.9, device=device), torch.tensor(0.99)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, capturable=True, foreach=False)
    state = OptimizerState(optimizer)
    with patch.object(Tensor, "__repr__", side_effect=AssertionError("it was printed")):
        before = state.guards()
        betas[0].fill_(0.5)
        assert state.guards() == before  # a replay reads it
        betas[1].fill_(0.9)
        assert state.guards() != before


def of_a_distribution(graphed: Graphed, device: torch.device, every: int) -> Values:
    """Reads a tensor that lies where no place is followed, an object of torch's."""
    held: dict[str, Any] = {}
    step = graphed()(lambda x: x - held["prior"].loc)
    for call in range(STEPS):
        if call % every == 0:
            where = torch.full((2,), float(call), device=device)
            held["prior"] = torch.distributions.Normal(where, where + 1, validate_args=False)
        yield step(torch.ones(2, device=device))
    assert not isinstance(step, GraphedStep) or step.captures == -(-STEPS // every)


@same_bits_as_eager
def test_memory_that_the_program_has_let_go_of_is_in_no_replay(
    graphed: Graphed, device: torch.device
) -> Values:
    return of_a_distribution(graphed, device, 8)


@same_bits_as_eager
def test_memory_of_a_graph_that_the_program_has_let_go_of_is_in_no_replay_of_another(
    graphed: Graphed, device: torch.device
) -> Values:
    held: dict[str, Any] = {}

    def fill(x: Tensor) -> None:
        held["prior"] = torch.distributions.Normal(x + 1, x + 2, validate_args=False)

    decorate = graphed(warmup=1, pool=shardgrad.GraphPool(device))
    fills, step = decorate(fill), decorate(lambda x: x - held["prior"].loc)
    for call in range(7):
        x = torch.full((2,), float(call), device=device)
        (fill if call == 6 else fills)(x)
        yield step(x)


def test_memory_that_each_call_makes_anew_before_the_step_is_refused(device: torch.device) -> None:
    says = r"that was replaced or freed before the next call, 3 times[\s\S]*shape \(2,\) that"
    with pytest.raises(CaptureError, match=says):
        list(of_a_distribution(shardgrad.graphed_step, device, 1))


@same_bits_as_eager
def test_memory_that_inductor_allocates_in_a_capture_is_the_graphs(
    graphed: Graphed, device: torch.device
) -> Values:
    """It allocates without an operation, so a capture does not see where memory comes from."""
    allocate = torch._C._dynamo.guards._empty_strided_cuda

    @graphed(warmup=1)
    def step(x: Tensor) -> Tensor:
        doubled = allocate((2,), (1,), torch.float32)
        torch.mul(x, 2, out=doubled)
        return doubled + 1

    for call in range(6):
        yield step(torch.full((2,), float(call), device=device))
    require_replays(step, 1, 5)


class Gated(nn.Module):
    """Multiplies with a buffer, then applies whatever the program has put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix: Tensor
        self.register_buffer("mix", torch.arange(4.0).view(2, 2))
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.mix
        for each in self.more:
            y = each(y)
        return y + sum(self.more.buffers())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "mix", model.mix.t()),
        lambda model: model.mix.t_(),
        lambda model: model.more.append(nn.Tanh()),
        lambda model: model.more.register_buffer("bias", torch.ones(2, device="cuda")),
    ],
)
@same_bits_as_eager
def test_a_change_of_a_module_that_moves_no_memory_is_in_the_next_call(
    graphed: Graphed, device: torch.device, change: Callable[[Any], None]
) -> Values:
    model = Gated().cuda()
    step = graphed(model, warmup=1)(model.forward)
    for call in range(10):
        if call == 5:
            change(model)
        yield step(torch.ones(2, device=device))
    require_replays(step, 2, 8)


@same_bits_as_eager
def test_what_a_step_takes_away_is_away_after_a_replay(
    graphed: Graphed, device: torch.device
) -> Values:
    """A hint that the program gives before some calls is used once."""
    held: dict[str, Any] = {"hint": 0, "pair": None, "more": {}}
    hint = torch.ones(2, device=device)

    @graphed(warmup=1)
    def step(x: Tensor) -> Tensor:
        pair, held["pair"] = held["pair"], None
        more, held["more"] = held["more"], {}
        hint, held["hint"] = held["hint"], 0
        others = [*(pair or ()), *more.values(), held.pop("other", 0), hint]
        return x + sum(others)

    for call in range(16):
        if call < 6 or call % 3 == 0:
            held.update(hint=hint, pair=(hint, hint), other=hint)
            held["more"]["hint"] = hint
        yield step(torch.ones(2, device=device)), list(held), held["hint"], held["pair"]
    require_replays(step, 2, 15)


@same_bits_as_eager
def test_what_a_step_leaves_in_an_attribute_outlives_replays_of_earlier_graphs(
    graphed: Graphed, device: torch.device
) -> Values:
    held = {"cache": torch.zeros(WIDTH, WIDTH, device=device)}

    @graphed(warmup=1)
    def step(x: Tensor, kind: str) -> Tensor:
        y = x @ x
        if kind == "leave":
            held["cache"] = y + 1
        return (y @ x - 1).sum() + (held["cache"].sum() if kind == "read" else 0)

    for call in range(24):
        kind = "other" if call < 6 else ("leave", "other", "read")[call % 3]
        x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(call))
        yield step(x.to(device), kind), held["cache"]


def test_a_call_between_graphs_that_replaces_what_the_next_one_reads_is_an_error(
    device: torch.device,
) -> None:
    held = {"scale": torch.ones(2, device=device)}
    calls = itertools.count()

    def change() -> None:
        if next(calls) == 5:
            held["scale"] = held["scale"] * 2

    @shardgrad.graphed_step(warmup=1)
    def step(x: Tensor) -> Tensor:
        y = x * held["scale"]
        shardgrad.graphs.outside(change)
        return y * held["scale"]

    for _ in range(5):
        assert step(torch.ones(2, device=device)).tolist() == [1.0, 1.0]
    with pytest.raises(ReplayMismatchError, match=r"`outside` has replaced held\['scale'\]"):
        step(torch.ones(2, device=device))


def test_graphs_that_are_hardly_replayed_are_a_warning(device: torch.device) -> None:
    step = shardgrad.graphed_step(warmup=1)(lambda x, number: x + number)
    x = torch.ones(2, device=device)
    for call in range(31):
        step(x, call // 2)
    with pytest.warns(shardgrad.UncapturableStepWarning, match="16 graphs for 15 replays"):
        step(x, 15)


def test_a_program_may_capture_its_accumulation_by_itself(device: torch.device) -> None:
    """The capture waits for nothing that was recorded before it."""

    def trained(replays: int) -> Tensor:
        model, x = build(), batch(0, device)
        optimizer = shardgrad.optim.AdamW(model.parameters())

        def step() -> None:
            for is_last in (False, True):
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5 - replays):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(replays):
            graph.replay()
        with torch.no_grad():
            return loss_of(model, x)

    assert torch.equal(trained(0), trained(3))
