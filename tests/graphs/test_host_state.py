"""Random numbers of a step are put back; compiled regions stay compiled."""

from __future__ import annotations

from typing import Any

import torch

from shardgrad.graphs.capturable import host_snapshot
from shardgrad.graphs.pool import GraphPool
from shardgrad.graphs.reads import Reads

CPU = torch.device("cpu")


def test_the_same_numbers_are_drawn_again_from_every_generator_that_was_named() -> None:
    ours, another = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    restore = host_snapshot([], CPU, [ours])
    first = [torch.rand(3, generator=generator) for generator in (None, ours, another)]
    restore()
    again = [torch.rand(3, generator=generator) for generator in (None, ours, another)]
    assert [torch.equal(a, b) for a, b in zip(first, again, strict=True)] == [True, True, False]


def test_a_compiled_region_runs_compiled_in_a_capture() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    double = torch.compile(lambda x: x.sin() * 2, backend=backend)
    with Reads(lambda: None, [], [], GraphPool(CPU), [], []):
        assert torch.equal(double(torch.ones(4)), torch.ones(4).sin() * 2)
        assert compiled == [1]
