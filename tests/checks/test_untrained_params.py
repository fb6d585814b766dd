"""The first step of an optimizer says which parameters stand still."""

from __future__ import annotations

import gc
import warnings
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import shardgrad
from shardgrad import UntrainedParameterWarning
from shardgrad.policies import GradientPolicy
from tests.support.parity import SHARDGRAD, Half, stack
from tests.support.ranks import Ranks


def said(action: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if issubclass(w.category, UntrainedParameterWarning)]


def backward(model: nn.Module) -> None:
    SHARDGRAD.loss(model, 0, 5, dtype=next(model.parameters()).dtype).backward()


def ready(
    model: nn.Module | None = None, kind: Any = shardgrad.optim.SGD, lr: float = 0.1
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a sharded model and its optimizer, after a backward."""
    model = SHARDGRAD.fully_shard(model or stack(5, 3))
    optim = kind(model.parameters(), lr=lr)
    backward(model)
    return model, optim


def the_wrong_attribute() -> None:
    model = stack(5, 3)
    shardgrad.fully_shard(model, gradient_policy=GradientPolicy(decoupled=True))
    optim = torch.optim.AdamW(model.parameters())
    backward(model)
    (text,) = said(optim.step)
    assert "0.weight" in text
    assert "decoupled_grad" in text


def gradients_of_a_closure_only_where_they_are_missing() -> None:
    model = SHARDGRAD.fully_shard(Half())
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    (text,) = said(lambda: optim.step(lambda: backward(model)))
    assert "had none: unused.weight, unused.bias. " in text


def nothing_of_a_step_that_failed_and_was_given_up() -> None:
    model, optim = ready(kind=torch.optim.SGD)
    left = weakref.ref(optim)

    def fails() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optim.step(fails)
    del model, optim
    gc.collect()
    assert left() is None


def steps_that_vanish() -> None:
    model, optim = ready(stack(5, 3).to(torch.bfloat16), shardgrad.optim.AdamW, 1e-9)
    (text,) = said(optim.step)
    assert "did not change" in text
    assert "master" in text
    keeping = ({"master": "float32"}, {"master": "remainder"}, {"stochastic_rounding": True})
    for kind, options in product((shardgrad.optim.AdamW, shardgrad.optim.SGD), keeping):
        backward(model)
        optim = kind(model.parameters(), lr=1e-9, **options)
        assert not said(optim.step), "the step is kept elsewhere"


def gradients_that_are_missing() -> None:
    _, optim = ready(Half())
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(UntrainedParameterWarning, match=r"unused\.weight, unused\.bias"),
    ):
        optim.step()
    assert not said(optim.step), "once is enough"


def silence_when_all_is_well() -> None:
    model = stack(5, 3)
    model[0].bias.requires_grad_(False)
    _, optim = ready(model)
    assert not said(optim.step)


def a_gradient_that_is_only_rounding_is_not_spoken_of() -> None:
    """A normalization takes away what a bias in front of it adds: its gradient is a sum that
    cancels.
    """
    torch.manual_seed(0)
    model = SHARDGRAD.fully_shard(
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
    )
    optim = torch.optim.SGD(model.parameters(), lr=1e-4)
    for number in range(4):
        SHARDGRAD.loss(model, number, 64).backward()
    bias = model[0].bias.grad.to_local()
    assert bias.any()
    assert bias.abs().amax() < 1e-5
    assert not said(optim.step)


def a_warm_up_from_zero_is_waited_for() -> None:
    _, optim = ready(lr=0.0)
    assert not said(optim.step)
    optim.param_groups[0]["lr"] = 1e-30
    assert said(optim.step), (
        "the first step that should have moved something is the one that counts"
    )


def a_pretended_step_is_waited_for() -> None:
    """torch's state dict functions take a step with a learning rate and gradients of zero to make
    state.
    """
    model = SHARDGRAD.fully_shard(stack(5, 3).to(torch.bfloat16))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-9)
    assert not said(lambda: get_optimizer_state_dict(model, optim))
    backward(model)
    (text,) = said(optim.step)
    assert "did not change" in text


def a_group_that_is_warmed_up_later_is_not_spoken_of() -> None:
    model, _ = ready()
    optim = torch.optim.SGD(
        [{"params": [model[0].weight], "lr": 0.0}, {"params": [model[0].bias]}], lr=0.1
    )
    assert not said(optim.step)


def groups_without_parameters_or_with_frozen_ones() -> None:
    model = SHARDGRAD.fully_shard(stack(5, 4, 3))
    model[0].requires_grad_(False)
    groups = [list(model[2].parameters()), [], list(model[0].parameters())]
    for home in (torch.optim, shardgrad.optim):
        optim = home.SGD([{"params": group} for group in groups], lr=0.1)
        backward(model)
        (text,) = said(optim.step)
        assert "groups had no parameter that requires a gradient: 1, 2." in text
        assert not said(optim.step)


def a_skipped_step_is_waited_for() -> None:
    model, optim = ready(Half())
    next(p.grad for p in model.parameters() if p.grad is not None).fill_(torch.inf)
    shardgrad.clip_grad_norm_(model, 1.0)
    assert not said(optim.step)
    optim.zero_grad()
    backward(model)
    (text,) = said(optim.step)
    assert "had none: unused.weight, unused.bias. " in text


@pytest.mark.parametrize(
    "case",
    [
        the_wrong_attribute,
        nothing_of_a_step_that_failed_and_was_given_up,
        steps_that_vanish,
        gradients_that_are_missing,
        gradients_of_a_closure_only_where_they_are_missing,
        silence_when_all_is_well,
        a_gradient_that_is_only_rounding_is_not_spoken_of,
        a_warm_up_from_zero_is_waited_for,
        a_skipped_step_is_waited_for,
        a_pretended_step_is_waited_for,
        a_group_that_is_warmed_up_later_is_not_spoken_of,
        groups_without_parameters_or_with_frozen_ones,
    ],
    ids=lambda case: case.__name__,
)
def test_the_first_step_speaks_of(two_ranks: Ranks, case: Any) -> None:
    two_ranks.run(case)
