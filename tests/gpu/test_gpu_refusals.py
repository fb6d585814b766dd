"""What a graphed step refuses before it launches anything, each in its sentence."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import shardgrad
from shardgrad.errors import (
    CaptureError,
    OptionError,
    ShardgradError,
    StepInputError,
)
from tests.support.gpu import ON_A_GPU

pytestmark = ON_A_GPU


def doubled(x: Any) -> Any:
    return x * 2


def given(what: Any) -> Callable[[], object]:
    """Calls a step with an argument."""
    return lambda: shardgrad.graphed_step()(doubled)(what)


def decorated(*capturables: Any, **settings: Any) -> Callable[[], object]:
    return lambda: shardgrad.graphed_step(*capturables, **settings)


def in_another_thread() -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(shardgrad.graphed_step()(doubled), torch.ones(2)).result()


def inside_another_step() -> None:
    inner = shardgrad.graphed_step()(doubled)
    shardgrad.graphed_step()(inner)(torch.ones(2))


def two_of_the_same(*apart: int) -> None:
    step, x = shardgrad.graphed_step(warmup=1)(torch.Tensor.add_), torch.ones(2, device="cuda")
    for other in (*apart, 0, 0):
        step(x, x + other if other else x)


def inside_a_capture() -> None:
    step, x = shardgrad.graphed_step()(doubled), torch.ones(2, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        x = x * 2
        step(x)


def with_other_data() -> None:
    held = torch.ones(2, device="cuda")
    step = shardgrad.graphed_step(warmup=1)(lambda x: setattr(held, "data", x))
    for _ in range(2):
        step(held)


@dataclass(frozen=True)
class Batch:
    x: Tensor


WEIGHT = torch.nn.Parameter(torch.ones(2))
REFUSED: dict[str, tuple[Callable[[], object], type[ShardgradError], str]] = {
    "no warm-up": (decorated(warmup=0), OptionError, "warmup=0"),
    "a pool of torch's": (decorated(pool=(0, 1)), OptionError, "a GraphPool or None"),
    "a scaler of torch's": (
        decorated(torch.amp.GradScaler("cuda")),
        OptionError,
        "torch's GradScaler reads on the host whether to skip",
    ),
    "a function": (
        decorated(doubled),
        OptionError,
        "(?s)objects of type function.*the function in the second pair of parentheses",
    ),
    "an input with a gradient": (given(WEIGHT * 1), StepInputError, "requires_grad=True"),
    "a sparse input": (
        given(torch.eye(2).to_sparse()),
        StepInputError,
        r"torch\.sparse",
    ),
    "an input without data": (given(torch.ones(2, device="meta")), StepInputError, "on meta"),
    "a subclass": (
        given(torch.ones(2).as_subclass(type("Tagged", (Tensor,), {}))),
        StepInputError,
        "got: *Tagged",
    ),
    "an object without a hash": (given({1}), StepInputError, "neither .* nor hashable"),
    "a dataclass that torch was not told of": (
        given(Batch(WEIGHT)),
        StepInputError,
        r"torch\.utils\._pytree\.register_dataclass\(Batch\)",
    ),
    "two views, one of them written": (
        two_of_the_same,
        StepInputError,
        "share memory",
    ),
    "two views, after others": (lambda: two_of_the_same(1, 2), StepInputError, "share memory"),
    "a tensor with other data": (with_other_data, CaptureError, "replaces the data of held"),
    "a call from another thread": (in_another_thread, CaptureError, "the thread that built it"),
    "a step in a step": (inside_another_step, CaptureError, r"step\.__wrapped__"),
    "a step in a capture": (inside_a_capture, CaptureError, r"inside another step or capture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_step_is_refused_in_a_sentence(name: str) -> None:
    program, kind, sentence = REFUSED[name]
    with pytest.raises(kind, match=sentence):
        program()
