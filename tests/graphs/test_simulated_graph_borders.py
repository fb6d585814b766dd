"""What a call leaves to the next one, if either is a graph: a verdict, the program's event,
settings. Clip factors and gradients are left by kept programs (`test_matrix.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import shardgrad
from shardgrad.graphs import Capturable
from tests.simulated.accelerator.device import NAME
from tests.simulated.programs.graphed import (
    WIDTH,
    batch,
    build,
    loss_of,
    same_bits_as_eager,
)
from tests.support.graphed import Graphed, Values, require_replays, step_of


@same_bits_as_eager(2)
def test_a_scaler_may_be_updated_in_the_next_call(graphed: Graphed) -> Values:
    """The scaler's verdict crosses a border; every third step has an infinity."""
    model = build()
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    scaler = shardgrad.GradScaler(init_scale=64.0, growth_interval=3)

    @graphed(model, optimizer, scaler)
    def step(x: Tensor) -> None:
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()

    update = graphed(scaler, pool=getattr(step, "pool", None))(scaler.update)
    for number in range(20):
        x = batch(number, 4 if number % 2 else 6)
        if number % 3 == 2:
            x[0, 0] = torch.inf
        step(x)
        update()
        yield scaler.get_scale()
    require_replays(step, 2, 17)
    require_replays(update, 1, 17)
    yield model


@same_bits_as_eager(2)
def test_a_verdict_on_fewer_gradients_is_not_taken_over(graphed: Graphed) -> Values:
    """The scaler relies on the norms before the call, until they leave out a gradient."""
    model = build(1)
    first, second = model[0].first, model[0].second
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    scaler = shardgrad.GradScaler(init_scale=1.0)
    step = graphed(model, optimizer, scaler)(lambda: scaler.step(optimizer))
    for number in range(10):
        scaler.scale(loss_of(model, batch(number))).backward()
        if number == 8:
            second.bias.grad.to_local().fill_(torch.inf)
        for params in first.parameters(), [*second.parameters()][: 1 + (number < 5)]:
            shardgrad.clip_grad_norm_(params, torch.inf)
        step()
        scaler.update()
        optimizer.zero_grad()
        yield model, scaler.get_scale()
    require_replays(step, 2, 6)


@same_bits_as_eager(2)
def test_a_verdict_of_a_replay_is_about_gradients_that_were_written_before(
    graphed: Graphed,
) -> Values:
    """The optimizer skips the step with an infinity, as after an eager call."""
    model = build(1)
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)

    @graphed(model)
    def step(x: Tensor) -> None:
        loss_of(model, x).backward()
        shardgrad.clip_grad_norm_(model, 1.0)

    for number in range(8):
        step(batch(number) / (number != 6))
        optimizer.step()
        yield model
        nn.Module.zero_grad(model, set_to_none=False)
    require_replays(step, 1, 5)


@same_bits_as_eager(2)
def test_an_event_of_the_optimizer_may_be_recorded_in_the_step(graphed: Graphed) -> Values:
    """FSDP2's `set_post_optim_event`, called in the step that the event is recorded in."""
    model = build()
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)

    @graphed(model, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        event = torch.Event(x.device)
        event.record(torch.accelerator.current_stream())
        model.set_post_optim_event(event)
        return loss

    for number in range(7):
        yield step(batch(number))
    require_replays(step, 1, 4)
    yield model


@same_bits_as_eager(1)
def test_a_program_does_what_it_likes_with_what_a_step_returns(graphed: Graphed) -> Values:
    step = graphed()(lambda x: {"all": x.sum(0), "mean": [x.mean()]})
    for number in range(6):
        found = step(batch(number))
        found["rate"] = found.pop("all").unsqueeze_(0)
        found["mean"].append(1.0)
        yield found
    require_replays(step, 1, 3)


class Phase(Capturable):
    """A program's own state, without guards."""

    name = "idle"

    def snapshot(self) -> Callable[[], None]:
        return partial(setattr, self, "name", self.name)


@same_bits_as_eager(2)
def test_modes_that_a_step_sets_are_those_after_a_replay(graphed: Graphed) -> Values:
    """What a step has set on the host is set after a replay, too."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters())
    (group,) = optimizer.param_groups
    phase = Phase()
    taken = step_of(model, optimizer)

    @graphed(model, optimizer, phase)
    def step(x: Tensor) -> Tensor:
        loss = taken(x)
        phase.name = "trained"
        group["lr"] = 0.2
        model.eval()
        model.set_requires_gradient_sync(False)
        return loss

    for number in range(7):
        model.train()
        model.set_requires_gradient_sync(True)
        phase.name = "idle"
        group["lr"] = 0.1
        yield (
            step(batch(number)),
            [module.training for module in model.modules()],
            phase.name,
            group,
        )
    require_replays(step, 1, 4)
    loss_of(model, batch(7)).backward()
    yield model, [param.grad for param in model.parameters()]


@same_bits_as_eager(1)
def test_gradients_that_a_step_leaves_on_plain_parameters_are_there_after_a_replay(
    graphed: Graphed,
) -> Values:
    torch.manual_seed(0)
    model, absent = nn.Linear(WIDTH, WIDTH, device=NAME), list[bool]()

    @graphed(model)
    def step(x: Tensor) -> None:
        loss = loss_of(model, x)
        shardgrad.graphs.outside(lambda: absent.append(model.weight.grad is None))
        loss.backward()

    for number in range(6):
        step(batch(number))
        yield [torch.tensor(absent), *(param.grad.clone() for param in model.parameters())]
        model.zero_grad()
    require_replays(step, 1, 3)


@same_bits_as_eager(2)
def test_parameters_may_be_written_after_an_error(graphed: Graphed) -> Values:
    """The program goes on at once on its own stream, with parameters that the step was still
    reading.
    """
    model = build()
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)

    taken = step_of(model, optimizer)

    @graphed(model, optimizer)
    def step(x: Tensor, is_bad: bool) -> Tensor:
        if is_bad:
            loss_of(model, x)
            raise ValueError
        return taken(x)

    for number in range(8):
        try:
            step(batch(number), number == 6)
        except ValueError:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.99)
    require_replays(step, 1, 4)
    yield model


@same_bits_as_eager(1)
def test_an_output_may_be_what_the_next_call_writes(graphed: Graphed) -> Values:
    step = graphed()(lambda x: x.mul_(2.0) + 1.0)
    value = torch.ones(2, device=NAME)
    for _ in range(8):
        value = step(value)
        yield [value.clone()]
    require_replays(step, 1, 5)
