"""What a step reads without being given it, and the line of the program that raised."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardgrad.graphs.program_line import line_that_raised
from shardgrad.graphs.reads import Reads


def read(step: Callable[[], Any], known: list[torch.Tensor] | None = None) -> Reads:
    with Reads(known or []) as reads:
        step()
    return reads


def test_a_tensor_that_a_line_read_and_that_is_gone_is_named_with_the_line() -> None:
    held = {"mask": torch.ones(2, 3), "stays": torch.ones(2, 3)}

    def step() -> None:
        made = held["mask"] * held["stays"]
        made.add_(1)

    reads = read(step)
    assert reads.gone() == []
    held["mask"] = torch.zeros(2, 3)
    (gone,) = reads.gone()
    assert re.fullmatch(
        r"a tensor \(float32 of shape \(2, 3\)\) in .*test_reads\.py:\d+ in step: made = held.*",
        gone,
    )


def test_what_the_step_was_given_may_go() -> None:
    held = [torch.ones(2)]
    reads = read(lambda: held[0] * 2, known=[held[0]])
    held.clear()
    assert reads.gone() == []


def test_what_the_step_writes_is_found_and_what_it_makes_is_not() -> None:
    stays, running = torch.ones(2), torch.zeros(2)

    def step() -> None:
        made = torch.arange(2.0)
        running.lerp_(stays * made.mul_(2), 0.1)

    (written,) = read(step).written()
    assert written.data_ptr() == running.data_ptr()


def test_memory_that_is_gone_is_not_among_what_was_written() -> None:
    held = [torch.ones(2)]
    reads = read(lambda: held[0].mul_(2))
    held.clear()
    assert list(reads.written()) == []


# -- the line that raised


class Raises(nn.Module):
    """A layer whose forward, or a hook of whose backward, raises."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(2, 2), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.where == "forward":
            torch.ones(2) + torch.ones(3)
        y.register_hook(refuse)
        return y


def refuse(grad: torch.Tensor) -> None:
    raise RuntimeError("refused")


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("forward", r"module 1, .*test_reads\.py:\d+ in forward: torch\.ones\(2\) \+"),
        ("backward", r".*test_reads\.py:\d+ in refuse: raise RuntimeError"),
    ],
)
def test_an_error_is_named_with_the_innermost_line_and_its_module(
    where: str, expected: str
) -> None:
    model = nn.Sequential(nn.Identity(), Raises(where))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2)).sum().backward()
    assert re.match(expected, line_that_raised(caught.value, [model]))


def test_an_error_outside_of_the_program_has_no_line() -> None:
    assert line_that_raised(RuntimeError("made, and not raised"), []) == ""
