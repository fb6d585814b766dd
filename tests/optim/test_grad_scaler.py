"""Loss scaling decides on the device, the same on every rank, and like torch's."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardgrad
from shardgrad.errors import OptionError
from tests.support.parity import SHARDGRAD, stack, unchanged
from tests.support.ranks import on_ranks


def build() -> nn.Module:
    return SHARDGRAD.fully_shard(stack(5, 4, 3))


def backward(model: nn.Module, scaler: Any) -> None:
    scaler.scale(SHARDGRAD.loss(model, 0, 5)).backward()


@pytest.mark.parametrize("bad", [set(), {0}, {1}, {0, 1}])
def test_the_scale_moves_as_torchs_whichever_of_two_optimizers_finds_an_infinity(
    bad: set[int],
) -> None:
    """A state is loaded between two good steps, too, and steps without the scaler are taken."""
    found = []
    for scaler_of, home in (
        (shardgrad.GradScaler, shardgrad.optim),
        (partial(torch.amp.GradScaler, "cpu"), torch.optim),
    ):
        scaler, models = scaler_of(init_scale=1024.0, growth_interval=2), (stack(5, 3), stack(5, 3))
        optims = [home.SGD(model.parameters(), lr=0.1) for model in models]
        for step in range(6):
            for number, (model, optim) in enumerate(zip(models, optims, strict=True)):
                optim.zero_grad()
                scaler.scale(model(torch.ones(2, 5)).sum()).backward()
                if step == 2 and number in bad:
                    model[0].weight.grad[0, 0] = math.inf
                scaler.step(optim)
            scaler.update()
            optims[0].step()
            found.append((scaler.get_scale(), models[0][0].bias.tolist()))
            if step == 3:
                scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": step % 2})
    assert found[:6] == found[6:]


@pytest.mark.parametrize("bad", [0, 2, None])
@on_ranks(2)
def test_two_optimizers_over_one_unit_take_the_scale_out_once(bad: int | None) -> None:
    """The one with an infinite gradient skips, and the other does not."""
    model, scaler = build(), shardgrad.GradScaler("cpu", 1024.0)  # as torch.amp.GradScaler
    halves = [shardgrad.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    right = build()
    SHARDGRAD.loss(right, 0, 5).backward()
    backward(model, scaler)
    if bad is not None:
        model[bad].weight.grad.mul_(math.inf)
        right[bad].zero_grad(set_to_none=False)
    scaler.unscale_(halves[0])
    model[0].weight.grad.to_local().nan_to_num_(0, 0, 0)  # hides what was found
    before = [p.to_local().clone() for p in model.parameters()]
    for optim in halves:
        scaler.step(optim)
    scaler.update()
    for p, old, q in zip(model.parameters(), before, right.parameters(), strict=True):
        torch.testing.assert_close(p.to_local(), old - 0.1 * q.grad.to_local())


@pytest.mark.parametrize("bad", range(3))
@on_ranks(2)
def test_an_infinity_that_comes_after_unscale_counts_in_whichever_part_it_is(bad: int) -> None:
    """The norms of both parts of the unit are known; that of a parameter beside them is not."""
    model, beside = build(), nn.Parameter(torch.ones(3))
    params, scaler = [*model.parameters(), beside], shardgrad.GradScaler(init_scale=8.0)
    optim = shardgrad.optim.SGD(params if bad == 2 else params[:-1], lr=0.1)
    backward(model, scaler)
    beside.grad = torch.ones(3)
    with unchanged(params):
        scaler.unscale_(optim)
        params[2 * bad].grad.mul_(math.inf)
        for part in (model[0], model[2]):
            shardgrad.clip_grad_norm_(part, 1.0)
        scaler.step(optim)
        scaler.update()
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_a_wrong_order_of_calls_is_refused() -> None:
    model, scaler = build(), shardgrad.GradScaler()
    optim = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    for scale in (8.0, None):
        with pytest.raises(OptionError, match="inf checks"):
            scaler.update()
        backward(model, scaler)
        restore = scaler.snapshot()
        scaler.unscale_(optim)
        with pytest.raises(OptionError, match="already been called"):
            scaler.unscale_(optim)
        restore()  # after a capture that failed
        scaler.unscale_(optim)
        scaler.step(optim)
        with pytest.raises(OptionError, match="already been called"):
            scaler.step(optim)
        with pytest.raises(OptionError, match="Closure"):
            scaler.step(optim, lambda: None)
        scaler.update(scale)
    optim.register_step_pre_hook(lambda *_: scaler.unscale_(optim))
    backward(model, scaler)
    with pytest.raises(OptionError, match="already been called"):
        scaler.step(optim)
    assert not hasattr(optim, "found_inf")  # a step that failed leaves no verdict
    for settings in (
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"init_scale": "1"},
        {"init_scale": math.inf},
    ):
        with pytest.raises(OptionError, match="outside its range"):
            shardgrad.GradScaler(**settings)
    with pytest.raises(OptionError, match="empty"):
        scaler.load_state_dict({})


@on_ranks(2)
def test_torchs_scaler_may_meet_an_optimizer_without_gradients() -> None:
    model, idle, scaler = build(), build(), torch.amp.GradScaler("cpu")
    optim = shardgrad.optim.SGD(model.parameters(), lr=0.5)
    backward(model, scaler)
    with unchanged(idle.parameters()):
        scaler.step(shardgrad.optim.SGD(idle.parameters(), lr=0.5))
    scaler.step(optim)
    assert optim.state[model[0].weight]["step"] == 1


@on_ranks(2)
def test_states_go_to_and_from_torchs_scaler() -> None:
    ours, theirs = shardgrad.GradScaler(), torch.amp.GradScaler("cpu")
    state = {**theirs.state_dict(), "scale": 64.0, "_growth_tracker": 3}
    state |= {"growth_interval": 7, "growth_factor": 4.0, "backoff_factor": 0.25}
    loss = torch.ones(())
    for _ in range(2):  # before there is a scale on the device, and in its place
        ours.load_state_dict(state)
        assert ours.state_dict() == state
        theirs.load_state_dict(ours.state_dict())
        assert ours.get_scale() == theirs.get_scale() == 64.0
        assert ours.scale([loss, {"a": loss}]) == [64.0, {"a": 64.0}]
        ours.load_state_dict(state | {"scale": 1.0, "_growth_tracker": 0})
    ours.update(new_scale=32.0)
    assert ours.get_scale() == 32.0
    disabled = shardgrad.GradScaler(enabled=False)
    assert disabled.scale(loss) is loss
    assert (disabled.state_dict(), disabled.get_scale()) == ({}, 1.0)
