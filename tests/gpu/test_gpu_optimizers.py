"""Clip and step on one device. How a captured update follows a schedule and skips is shown by
`tests/optim/test_simulated_optimizers.py`, and for whole programs by random ones.

On a machine with a GPU: `make test ARGS="tests/gpu"`; without one `make test-cuda`.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardgrad
from shardgrad.optim import muon
from tests.support.gpu import ON_ONE_RANK
from tests.support.graphed import (
    Graphed,
    Values,
    eager,
    on_one_gpu,
    require_replays,
    require_same,
    same_bits_as_eager,
    values_of,
)

pytestmark = ON_ONE_RANK
DEVICE = torch.device("cuda")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step))


def test_muon_trains_on_a_device_as_on_the_cpu() -> None:
    sharded, plain = on_one_gpu(layers()), layers()
    for model, device in ((sharded, DEVICE), (plain, torch.device("cpu"))):
        optim = shardgrad.optim.Muon(model.parameters(), lr=1e-2)
        for step in range(3):
            model(batch(step).to(device)).square().mean().backward()
            shardgrad.clip_grad_norm_(model, 0.1)
            optim.step()
            optim.zero_grad()
    # Newton-Schulz multiplies in bfloat16: its step of 1e-2 is right to some parts in a hundred.
    for ours, right in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.to_local().cpu(), right, rtol=1e-2, atol=5e-4)


@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
@same_bits_as_eager
def test_a_limit_that_is_computed_on_the_device_clips_at_its_present_value(
    graph: Graphed, decoupled: bool
) -> Values:
    model = on_one_gpu(layers(), gradient_policy=shardgrad.GradientPolicy(decoupled=decoupled))
    optim = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)
    limit = torch.ones((), device=DEVICE)

    @graph(model, optim)
    def step(x: torch.Tensor) -> torch.Tensor:
        model(x).square().mean().backward()
        norm = shardgrad.clip_grad_norm_(model, limit)
        limit.copy_(0.9 * torch.minimum(limit, norm))
        optim.step()
        optim.zero_grad()
        return norm

    for number in range(6):
        yield step(batch(number).to(DEVICE))
    require_replays(step, 1, 3)
    yield limit, model


# -- states on the host


WIDE: dict[str, Any] = {"adamw": shardgrad.optim.AdamW, "muon": shardgrad.optim.Muon}


def trained(graphed: Graphed, name: str, *, on_host: bool) -> Values:
    model = on_one_gpu(layers())
    optim = WIDE[name](model.parameters(), lr=1e-2, states_on_host=on_host)

    @graphed(model, optim, warmup=2)
    def step(x: torch.Tensor, without: bool) -> None:
        model(x).square().mean().backward()
        model[without].weight.grad = None
        optim.step()
        optim.zero_grad()

    for number in range(10):
        step(batch(number).to(DEVICE), number in (1, 6, 7))
    states = optim.state_dict()["state"].values()
    pieces = [value for state in states for value in state.values() if value.ndim]
    assert {piece.device.type for piece in pieces} == {"cpu" if on_host else "cuda"}
    require_replays(step, 2, 7)
    yield model, pieces


@pytest.mark.parametrize("graphed", [eager, shardgrad.graphed_step])
@pytest.mark.parametrize("name", WIDE)
@mock.patch.object(muon, "_MOST_PLANS", 1)  # graphs keep theirs
def test_states_on_the_host_train_alike(name: str, graphed: Graphed) -> None:
    right = values_of(trained(eager, name, on_host=False))
    require_same(right, values_of(trained(graphed, name, on_host=True)))


def memory_of(name: str, *, on_host: bool) -> tuple[int, int]:
    """Returns bytes that an optimizer holds between steps, and those it adds for a while."""
    model = on_one_gpu(layers())
    first = torch.cuda.memory_allocated()
    optim = WIDE[name](model.parameters(), states_on_host=on_host)
    assert list(optim.buffers())
    held = torch.cuda.memory_allocated() - first
    for number in range(2):
        model(batch(number).to(DEVICE)).square().mean().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optim.step()
        peak = torch.cuda.max_memory_allocated() - before
        optim.zero_grad()
    return held, peak


@pytest.mark.parametrize("name", WIDE)
def test_states_on_the_host_take_two_chunks_of_the_device_in_a_step_and_nothing_between(
    name: str,
) -> None:
    (held, peak), (right_held, right_peak) = (
        memory_of(name, on_host=on_host) for on_host in (True, False)
    )
    of_a_layer = {"adamw": 2, "muon": 1}[name] * 4 * 64 * 64
    assert right_held - held == 3 * of_a_layer
    assert peak <= right_peak + 2 * of_a_layer
    assert name == "muon" or peak == right_peak + 2 * of_a_layer
