"""Whole training steps captured and replayed: the same bits as eager, whatever a step is made
of.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

import shardgrad
from shardgrad.errors import ForeignParameterError
from shardgrad.sharding.dtensor import local_of
from tests.simulated.accelerator.device import NAME
from tests.simulated.accelerator.virtual_ranks import on_virtual_ranks, one_at_a_time
from tests.simulated.programs.graphed import (
    WIDTH,
    batch,
    build,
    loss_of,
    same_bits_as_eager,
    training_step,
)
from tests.support.graphed import Graphed, Values, require_replays, step_of


@same_bits_as_eager(1)
def test_each_shape_has_its_graph_and_the_oldest_is_dropped(
    graphed: Graphed,
) -> Values:
    model = build()

    step = training_step(graphed, model, max_graphs=2)
    shapes = [4, 4, 4, 4, 2, 2, 2, 4, 2, 6, 6, 4, 6, 2, 4, 2, 2]
    # A new shape now and then is not warned of.
    with warnings.catch_warnings(action="error", category=shardgrad.UncapturableStepWarning):
        for number, rows in enumerate([*shapes, 1, 2, 3, 2, 5, 2, 7, 2, 8, 2, 9, 2, 10]):
            yield step(batch(number, rows))
    # A third shape drops the one that was not used for longest, whose next call runs eagerly.
    require_replays(step, 4, 17)
    yield model


@same_bits_as_eager(2)
def test_gradients_that_a_step_exchanges_are_all_read_first(graphed: Graphed) -> Values:
    """One is dropped. The optimizer steps after the call, and the step writes a weight."""
    model = build()
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    layers = [layer for block in model for layer in (block.first, block.second)]

    @graphed(model, warmup=2)
    def step(x: Tensor) -> Tensor:
        local = layers[0].weight.to_local()
        with torch.no_grad():
            local.mul_(0.5).add_(local)
        loss = loss_of(model, x)
        loss.backward()
        layers[0].bias.grad = None
        grads = [layer.weight.grad for layer in layers]
        for layer, grad in zip(layers, grads[1:] + grads[:1], strict=True):
            layer.weight.grad = grad
        return loss

    for number in range(6):
        yield step(batch(number))
        optimizer.step()
        optimizer.zero_grad()
    require_replays(step, captures=1, replays=3)
    yield model


@same_bits_as_eager(2)
def test_a_gradient_that_a_step_keeps_is_not_written_over_by_its_next_backward(
    graphed: Graphed,
) -> Values:
    """As in gradient surgery."""
    model = build(1)
    optimizer, weight = shardgrad.optim.SGD(model.parameters(), lr=0.1), model[0].first.weight

    @graphed(model, optimizer)
    def step(x: Tensor) -> None:
        loss_of(model, x).backward()
        kept = weight.grad
        optimizer.zero_grad()
        loss_of(model, x.flip(0)).backward()
        weight.grad = weight.grad + kept
        optimizer.step()
        optimizer.zero_grad()

    for number in range(5):
        step(batch(number))
    yield model


@on_virtual_ranks(2)
def test_a_weights_version_moves_with_a_replay_as_with_an_optimizers_step() -> None:
    """What a layer keeps of a weight, such as a copy in another precision, is made again then."""
    model = build()
    step = training_step(shardgrad.graphed_step, model)
    block, seen = model[0], []
    for number in range(6):
        step(batch(number))
        assert isinstance(block.first.weight, DTensor), "a call ends what the program has unsharded"
        block.unshard()
        seen.append(block.first.weight._version)
    assert step.replays > 2
    assert seen == sorted(set(seen))
    step.close()


@on_virtual_ranks(2)
def test_data_that_no_replay_would_read_is_refused() -> None:
    model = build()
    step = training_step(shardgrad.graphed_step, model)
    for number in range(6):
        step(batch(number))
    weight = model[0].first.weight
    weight.data = torch.zeros_like(weight)
    with pytest.raises(ForeignParameterError, match=r"first\.weight"):
        step(batch(6))
    step.close()


@pytest.mark.parametrize("steps", [1, 6])
@on_virtual_ranks(2)
def test_a_replay_ends_what_a_backward_that_made_a_graph_had_kept_unsharded(steps: int) -> None:
    """A step whose backward keeps no graph ends what an earlier one had kept, eager or replayed."""
    model = build()

    step = training_step(shardgrad.graphed_step, model)

    for number in range(steps):
        step(batch(number))
    inputs = batch(
        97
    ).requires_grad_()  # a backward that made a graph, of which the rest is dropped
    torch.autograd.grad(loss_of(model, inputs), inputs, create_graph=True)
    step(batch(steps))
    with torch.no_grad():
        model(batch(99))
    left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert not left, f"after an evaluation {left} are unsharded"
    step.close()


# -- torch's optimizers and plain modules


@same_bits_as_eager(2)
def test_a_graph_is_cut_around_an_optimizer_that_it_cannot_hold(graphed: Graphed) -> Values:
    """torch's AdamW counts its steps on the host: the graph is cut around it, and a schedule is
    followed; and where the host reads losses and gradients, before and between backwards, or gives
    parameters other gradients.
    """
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    log: list[float] = []

    def note(*values: Tensor) -> None:
        gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
        log.extend(value.square().sum().item() for value in (*values, *gradients))

    def halve() -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad / 2

    @graphed(model)
    def step(x: Tensor) -> Tensor:
        loss = torch.zeros((), device=x.device)
        for part in x.chunk(2):
            one = loss_of(model, part)
            shardgrad.graphs.outside(note, one)
            one.backward()
            shardgrad.graphs.outside(note)
            loss = loss + one.detach()
        shardgrad.graphs.outside(halve)
        norm = shardgrad.clip_grad_norm_(model, 0.1)
        shardgrad.graphs.outside(optimizer.step)
        optimizer.zero_grad()
        return loss + norm

    for number in range(8):
        yield step(batch(number))
        schedule.step()
    require_replays(step, 1, 5)
    yield from (log, model)


@pytest.mark.parametrize("make", ["ours", "torch's"])
@same_bits_as_eager(1)
def test_a_module_that_nobody_shards_is_captured_too(graphed: Graphed, make: str) -> Values:
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
    model = model.to(NAME)
    torch.get_device_module(NAME).manual_seed(1)
    if make == "ours":
        optimizer: torch.optim.Optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        lr = torch.tensor(1e-2, device=NAME)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, capturable=True, foreach=False)

    step = graphed(model, optimizer)(step_of(model, optimizer, 0.3))
    for number in range(14):
        if make == "torch's" and number < 8:
            lr.fill_(1e-2 / (number + 1))
        elif make == "torch's" and number == 8:  # another tensor: another graph
            optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device=NAME)
        yield step(batch(number))
    require_replays(step, *((1, 11) if make == "ours" else (2, 5 + 5)))
    yield model, list(model.buffers())


@same_bits_as_eager(1)
def test_state_that_is_written_past_torchs_dispatcher_is_written_once_a_call(
    graphed: Graphed,
) -> Values:
    """As a library's own kernels do: no operation tells what they write."""
    model = nn.Sequential(nn.BatchNorm1d(WIDTH, device=NAME), *build(1))
    model[1].uses_spare = True
    loss_of(model, batch(0)).backward()
    state = [*model.parameters(), *(p.grad for p in model.parameters()), model[0].running_var]
    optimizers = []
    for kind, part in ((torch.optim.SGD, model[0]), (shardgrad.optim.SGD, model[1])):
        optimizers.append(kind(part.parameters(), 0.1, 0.9))
        optimizers[-1].step()
        state += [each["momentum_buffer"] for each in optimizers[-1].state.values()]

    @graphed(model, *optimizers)
    def step() -> None:
        with torch.no_grad(), _disable_current_modes():
            torch._foreach_neg_(list(map(local_of, state)))

    for _ in range(8):
        yield step()
    require_replays(step, 1, 5)
    yield state


@pytest.mark.parametrize("what", ["parameter", "buffer", "module", "first"])
@same_bits_as_eager(1)
def test_what_is_replaced_in_a_module_that_nobody_shards_is_another_graph(
    graphed: Graphed, what: str
) -> Values:
    with one_at_a_time():
        torch.manual_seed(0)
        layers = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Sequential()
    model = nn.Sequential(*layers).to(NAME).requires_grad_(False).eval()

    @graphed(model, warmup=1)
    def step(x: Tensor) -> Tensor:
        return model(x).square().sum()

    for number in range(8):
        if number == 4 and what == "parameter":
            model[0].weight = nn.Parameter(model[0].weight * 0.5, requires_grad=False)
        elif number == 4 and what == "buffer":
            model[1].running_mean = model[1].running_mean + 1
        elif number == 4 and what == "module":
            model[2] = nn.Tanh().eval()
        elif number == 4:  # where there was none
            model[2].append(nn.Tanh().eval())
        yield step(batch(number))
    require_replays(step, 2, 6)


@pytest.mark.parametrize("name", ["mean", "now"])
@same_bits_as_eager(1)
def test_a_step_that_replaces_what_a_module_has_is_not_captured(
    graphed: Graphed, name: str
) -> Values:
    """A buffer, as of a running mean, or a module, as of activations that take turns."""
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(WIDTH, device=NAME))
    model.now, model.next = nn.Tanh(), nn.Sigmoid()

    @graphed(model, warmup=1, on_uncapturable="eager")
    def step(x: Tensor) -> Tensor:
        if name == "mean":
            model.mean = model.mean * 0.5 + x.mean(0) * 0.5
        else:
            model.now, model.next = model.next, model.now
        return model.now(x - model.mean).square().sum()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seen = [step(batch(number)).item() for number in range(12)]
    if isinstance(step, shardgrad.graphs.GraphedStep):
        assert step.replays == 0
        assert any(f"the step replaces {name}," in str(each.message) for each in told)
    yield seen, model.mean
