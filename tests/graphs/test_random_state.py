"""Random numbers of a step: put back, and in regions that backward recomputes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardgrad.errors import CaptureError
from shardgrad.graphs.closed_over import Reads
from shardgrad.graphs.random_state import RandomState
from shardgrad.graphs.recomputation import captured_recomputation

CPU = torch.device("cpu")


def test_the_same_numbers_are_drawn_again_from_every_generator_that_was_named() -> None:
    ours, another = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    state = RandomState(CPU, [ours])
    first = [torch.rand(3, generator=generator) for generator in (None, ours, another)]
    state.restore()
    again = [torch.rand(3, generator=generator) for generator in (None, ours, another)]
    assert [torch.equal(a, b) for a, b in zip(first, again, strict=True)] == [True, True, False]


def test_a_region_that_draws_is_refused_and_a_compiled_one_runs_compiled() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    double = torch.compile(lambda x: x.sin() * 2, backend=backend)
    x = torch.ones(4, requires_grad=True)
    with captured_recomputation(), Reads(lambda: None, []):
        assert torch.equal(double(torch.ones(4)), torch.ones(4).sin() * 2)
        assert compiled == [1]
        loss = checkpoint(torch.nn.functional.dropout, x, use_reentrant=False).sum()
        with pytest.raises(CaptureError, match="a recomputed region draws random numbers"):
            loss.backward()
