"""Clip and step on one device. How a captured update follows a schedule and skips is shown by
`tests/simulated/test_simulated_optimizers.py`, and for whole programs by random ones.

On a machine with a GPU: `make test ARGS="tests/gpu"`; without one `make test-cuda`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardgrad
from tests.support.graphed import on_one_gpu, require_replays, same_bits_as_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("one_rank"),
]
DEVICE = torch.device("cuda")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach().cpu().clone() for p in model.parameters()]


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
    for ours, right in zip(weights(sharded), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, right.detach(), rtol=1e-2, atol=5e-4)


@same_bits_as_eager
def test_a_limit_that_is_computed_on_the_device_clips_at_its_present_value(graph: Any) -> Any:
    model = on_one_gpu(layers())
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


WIDE = {"adamw": shardgrad.optim.AdamW, "muon": shardgrad.optim.Muon}


def trained(name: str, *, on_host: bool, graphed: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Trains; returns losses, weights and states, and the most bytes that a step of the optimizer
    has allocated for a while.
    """
    model = on_one_gpu(layers())
    optim: Any = WIDE[name](model.parameters(), lr=1e-2, states_on_host=on_host)
    peaks = []

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optim.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        optim.zero_grad()
        return loss

    run: Any = shardgrad.graphed_step(model, optim, warmup=2)(step) if graphed else step
    found = [run(batch(number).to(DEVICE)).detach().clone() for number in range(6)]
    states = optim.state_dict()["state"].values()
    pieces = [value for state in states for value in state.values() if value.ndim]
    assert {piece.device.type for piece in pieces} == {"cpu" if on_host else "cuda"}
    if graphed:
        assert (run.captures, run.replays) == (1, 4)
    found = [*found, *(piece.to_local() for piece in pieces)]
    return [*weights(model), *(one.cpu().clone() for one in found)], peaks[1:2]


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("name", WIDE)
def test_states_on_the_host_train_alike_and_take_two_chunks_in_a_step(
    name: str, graphed: bool
) -> None:
    ours, (peak,) = trained(name, on_host=True, graphed=graphed)
    right, (right_peak,) = trained(name, on_host=False, graphed=False)
    assert len(ours) == len(right)
    for value, expected in zip(ours, right, strict=True):
        assert torch.equal(value, expected)
    of_a_layer = {"adamw": 2, "muon": 1}[name] * 4 * 64 * 64
    assert peak <= right_peak + 2 * of_a_layer
    assert name == "muon" or peak == right_peak + 2 * of_a_layer


def test_no_state_is_on_the_device_between_steps() -> None:
    def held(on_host: bool) -> int:
        model = on_one_gpu(layers())
        before = torch.cuda.memory_allocated()
        optim = shardgrad.optim.AdamW(model.parameters(), states_on_host=on_host)
        assert len(list(optim.buffers())) > 1
        return torch.cuda.memory_allocated() - before

    on_host, on_device = held(True), held(False)
    assert on_device - on_host == 3 * 2 * 4 * 64 * 64
