"""What a call leaves to the next one, if either is a graph: clip factors, verdicts, the program's
event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardgrad
from tests.simulated.programs.graphed import (
    Setup,
    batch,
    build,
    loss_of,
    require_replays,
    same_on,
    weights,
)

CLIPS_HARD = 0.01


def scaler_updated_in_the_next_call(graphed: Callable[..., Any]) -> list[Any]:
    """The scaler's verdict crosses a border; every third step has an infinity."""
    model = build(Setup())
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    scaler = shardgrad.GradScaler(init_scale=64.0, growth_interval=3)

    @graphed(model, optimizer, scaler)
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        return loss

    pool = {"pool": step.pool} if isinstance(step, shardgrad.graphs.GraphedStep) else {}

    @graphed(scaler, **pool)
    def update(x: Tensor) -> None:
        scaler.update()

    seen = []
    for number in range(20):
        x = batch(number, 4 if number % 2 else 6)
        if number % 3 == 2:
            x[0, 0] = torch.inf
        step(x)
        update(batch(0))
        seen.append(scaler.get_scale())
    require_replays(step, 2, 17)
    require_replays(update, 1, 17)
    return seen + weights(model)


def event_of_the_optimizer(graphed: Callable[..., Any]) -> list[Any]:
    """FSDP2's `set_post_optim_event`, called in the step that the event is recorded in."""
    model = build(Setup())
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)

    @graphed(model, optimizer)
    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _record_post_optim_event(model, x.device)
        return loss

    seen = [step(batch(number)).item() for number in range(7)]
    require_replays(step, 1, 4)
    return seen + weights(model)


def update_on_another_stream(graphed: Callable[..., Any]) -> list[Any]:
    """The program's stream does not wait for the optimizer's; only the event says when it is
    done.
    """
    model = build(Setup())
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)

    @graphed(model)
    def gradients(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss

    seen, last = [], batch(0)
    stream = torch.Stream(last.device)
    for number in range(8):
        seen.append(gradients(batch(number)))
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            optimizer.step()
            optimizer.zero_grad()
            _record_post_optim_event(model, last.device)
        seen[-1] = seen[-1].item()
    require_replays(gradients, 1, 5)
    torch.accelerator.synchronize()
    return seen + weights(model)


def write_after_an_error(graphed: Callable[..., Any]) -> list[Any]:
    """The program goes on at once on its own stream, with parameters that the step was still
    reading.
    """
    model = build(Setup())
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)

    @graphed(model, optimizer)
    def step(x: Tensor, is_bad: bool) -> Tensor:
        loss = loss_of(model, x)
        if is_bad:
            raise ValueError
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number in range(8):
        try:
            step(batch(number), number == 6)
        except ValueError:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.99)
    require_replays(step, 1, 4)
    return weights(model)


def verdict_of_before_the_call(graphed: Callable[..., Any]) -> list[Any]:
    """In some calls the gradients were clipped before, and every third time one is an infinity."""
    model = build(Setup())
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)

    @graphed(model, optimizer)
    def update(x: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for number in range(16):
        x = batch(number)
        is_bad = number > 8 and number % 3 == 0
        if is_bad:
            x[0, 0] = torch.inf
        loss_of(model, x).backward()
        if number % 4 == 1 or is_bad:
            shardgrad.clip_grad_norm_(model, CLIPS_HARD)
        update(batch(0))
    require_replays(update, 2, 13)
    return weights(model)


def verdict_of_a_part(graphed: Callable[..., Any]) -> list[Any]:
    """In every other call a part of the gradients was zeroed after they had been looked at."""
    model = build(Setup())
    optimizer = shardgrad.optim.SGD(
        [block.first.weight for block in model], lr=0.1, weight_decay=0.1
    )
    scaler = shardgrad.GradScaler(init_scale=64.0, growth_interval=3)

    @graphed(model, optimizer, scaler)
    def update(x: Tensor) -> None:
        scaler.step(optimizer)
        scaler.update()

    seen = []
    for number in range(16):
        x = batch(number)
        if number > 8 and number % 3 == 0:
            x[0, 0] = torch.inf
        scaler.scale(loss_of(model, x)).backward()
        scaler.unscale_(optimizer)
        for part in ("first", "second"):
            params = [p for block in model for p in getattr(block, part).parameters()]
            shardgrad.clip_grad_norm_(params, CLIPS_HARD)
        if number % 2:
            optimizer.zero_grad(set_to_none=False)
        update(batch(0))
        seen.append(scaler.get_scale())
        model.zero_grad()
    require_replays(update, 2, 13)
    return seen + weights(model)


def _record_post_optim_event(model: nn.Module, device: torch.device) -> None:
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream())
    model.set_post_optim_event(event)


@pytest.mark.parametrize(
    "program",
    [
        scaler_updated_in_the_next_call,
        event_of_the_optimizer,
        update_on_another_stream,
        write_after_an_error,
        verdict_of_before_the_call,
        verdict_of_a_part,
    ],
    ids=lambda program: program.__name__.replace("_", " "),
)
def test_a_border_of_a_graph_changes_no_bit(program: Callable[..., Any]) -> None:
    same_on(2, program)
