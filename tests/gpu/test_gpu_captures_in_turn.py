"""Captures one after the other: after a reset, after a failure, in a shared pool, and by torch
alone.
"""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import shardgrad
from tests.support.graphed import Step, on_one_gpu, step_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("one_rank"),
]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = on_one_gpu(nn.Sequential(*layers))
    return model, shardgrad.optim.AdamW(model.parameters(), lr=1e-2)


def batch(number: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(number)).cuda()


def losses(step: Step, numbers: range, rows: int = 4) -> list[float]:
    return [step(batch(number, rows)).item() for number in numbers]


def eager_losses(count: int, rows: int = 4) -> list[float]:
    return losses(step_of(*build()), range(count), rows)


def test_steps_of_one_pool_are_reset_closed_and_captured_again() -> None:
    model, optimizer = build()
    graphed = partial(shardgrad.graphed_step, model, optimizer, warmup=2)
    first = graphed()(step_of(model, optimizer))
    second = graphed(pool=first.pool)(step_of(model, optimizer))
    seen = losses(first, range(4)) + losses(second, range(4, 8))
    first.reset()
    seen += losses(second, range(8, 10)) + losses(first, range(10, 14))
    assert (first.captures, first.replays) == (1, 2)
    first.close()
    third = graphed(pool=first.pool)(step_of(model, optimizer))
    seen += losses(third, range(14, 18))
    assert (third.captures, third.replays) == (1, 2)
    assert seen == eager_losses(18)


def test_other_calls_are_captured_after_a_first_capture_failed() -> None:
    model, optimizer = build()
    inner = step_of(model, optimizer)

    def fails_for_four_rows(x: Tensor) -> Tensor:
        loss = inner(x)
        if len(x) == 4 and torch.cuda.is_current_stream_capturing():
            loss.item()
        return loss

    step = shardgrad.graphed_step(model, optimizer, warmup=2, on_uncapturable="eager")(
        fails_for_four_rows
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardgrad.graphs.UncapturableStepWarning)
        losses(step, range(4))
    assert step.captures == 0
    losses(step, range(4), rows=6)
    assert step.captures == 1
    assert step.replays >= 2
