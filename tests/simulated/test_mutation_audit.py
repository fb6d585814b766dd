"""The mutation audit: the engine without one of its waits, or without the marks of one place, is
caught.

Edges are found by running the programs, so a new one is audited as soon as it is there. The table
is printed; `python -m tests.simulated.programs.audit` prints it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.engine.param_group import ParamGroup
from tests.simulated.accelerator import device
from tests.simulated.accelerator.virtual_ranks import VirtualRanks
from tests.simulated.programs.audit import Verdict, _verdict, by_edge, edges_of, ran, table
from tests.simulated.programs.edges import (
    ENDS_OF_ONE_RANK,
    NOT_IN_THE_MATRIX,
    READS_OF_ONE_RANK,
    Edge,
    watched,
)
from tests.simulated.programs.matrix import CASES


@cache
def _edges() -> Mapping[Edge, Mapping[str, int]]:
    return by_edge({name: ran(name)[1] for name in CASES})


def _without_each_edge(edges: Mapping[Edge, Mapping[str, int]]) -> list[Verdict]:
    return [_verdict(str(edge), makers, removed=edge) for edge, makers in sorted(edges.items())]


def _without_the_marks_of_each_place(edges: Mapping[Edge, Mapping[str, int]]) -> list[Verdict]:
    places: dict[str, dict[str, int]] = {}
    for edge, makers in edges.items():
        if ".py:" in edge.recorded:  # the process group's events are the simulator's own
            places.setdefault(edge.recorded, {}).update(makers)
    return [
        _verdict(f"the marks of {place}", makers, not_recorded=place)
        for place, makers in sorted(places.items())
    ]


def _require_all_caught(verdicts: list[Verdict]) -> None:
    print(table(verdicts))
    missed = [verdict.what for verdict in verdicts if not verdict.caught_by]
    assert not missed, (
        f"no program notices that {missed} are gone: they need a case in matrix.py, or deleting"
    )


def _files(names: Iterable[str]) -> set[str]:
    return {name.partition(":")[0] for name in names}


def test_edges_are_found_in_every_file_that_orders_streams() -> None:
    recorded = _files(edge.recorded for edge in _edges())
    files = {"all_gather.py", "buffers.py", "grad_collector.py"}
    assert recorded >= {*files, "hfsdp.py", "reduction.py", "root.py", "unsharded.py"}
    assert "outside of the engine" not in {
        place for edge in _edges() for place in (edge.recorded, edge.awaited)
    }


def test_every_edge_of_the_engine_is_needed_by_a_program() -> None:
    edges = {edge: makers for edge, makers in _edges().items() if edge not in NOT_IN_THE_MATRIX}
    _require_all_caught(_without_each_edge(edges))


class _Fan(nn.Module):
    """Units that read the batch, each in a stream that the caller chooses; the first is reduced
    last.
    """

    def __init__(self, units: int, *, follow_the_caller: bool = True) -> None:
        super().__init__()
        self.follow_the_caller = follow_the_caller
        self.units = nn.ModuleList(nn.Linear(4, 4) for _ in range(units))

    def forward(self, x: torch.Tensor, places: list[torch.Stream]) -> torch.Tensor:
        home, outputs = torch.accelerator.current_stream(), []
        for unit, place in zip(self.units, places, strict=True):
            if self.follow_the_caller:
                place.wait_stream(home)
            with place:
                outputs.append(unit(x))
        for place, output in zip(places, outputs, strict=True):
            home.wait_stream(place)
            output.record_stream(home)
        return torch.stack(outputs).sum(0)


def _two_backwards_on_three_streams_each() -> None:
    x = torch.ones(2, 4, device=device.NAME)
    model = _Fan(3).to(device.NAME)
    for module in (*model.units, model):
        shardgrad.fully_shard(module, mesh=init_device_mesh(device.NAME, (1,)))
    places = [[torch.Stream(device.NAME) for _ in range(3)] for _ in range(2)]
    torch.accelerator.synchronize()
    for _ in range(3):
        for number in range(2):
            model.set_is_last_backward(number == 1)
            model(x, places[number]).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None


@pytest.mark.parametrize("removed", [None, ENDS_OF_ONE_RANK])
def test_one_rank_writes_a_gradient_after_the_backward_before_wherever_that_ended(
    removed: Edge | None,
) -> None:
    with watched(removed), device.checked(raises=False) as hazards:
        VirtualRanks(1).run(_two_backwards_on_three_streams_each)
    assert {hazard.kind for hazard in hazards} == (
        set() if removed is None else {"write-after-write"}
    )


def _updates_that_no_side_stream_waits_for() -> None:
    x = torch.ones(2, 4, device=device.NAME)
    model = _Fan(2, follow_the_caller=False).to(device.NAME)
    for module in (*model.units, model):
        shardgrad.fully_shard(module, mesh=init_device_mesh(device.NAME, (1,)))
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    places = [torch.Stream(device.NAME) for _ in range(2)]
    torch.accelerator.synchronize()
    for _ in range(3):
        model(x, places).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # None would free memory, which streams wait for


@pytest.mark.parametrize("removed", [None, READS_OF_ONE_RANK])
def test_one_rank_reads_a_parameter_after_the_outermost_forward_began_in_any_stream(
    removed: Edge | None,
) -> None:
    with watched(removed), device.checked(raises=False) as hazards:
        VirtualRanks(1).run(_updates_that_no_side_stream_waits_for)
    assert {hazard.kind for hazard in hazards} == (
        set() if removed is None else {"read-after-write"}
    )


def test_the_marks_of_every_place_are_needed_by_a_program() -> None:
    _require_all_caught(_without_the_marks_of_each_place(_edges()))


# -- the audit can fail


@contextmanager
def _a_wait_that_nobody_needs() -> Iterator[None]:
    """Makes reductions wait for all-gathers, in `ParamGroup.unshard`'s caller."""
    original = ParamGroup.unshard

    def unshard(self: ParamGroup, runtime: Any) -> None:
        original(self, runtime)
        mark = runtime.streams.event()
        mark.record(runtime.streams.gather)
        mark.wait(runtime.streams.reduce)

    ParamGroup.unshard = unshard  # type: ignore[method-assign]
    try:
        yield
    finally:
        ParamGroup.unshard = original  # type: ignore[method-assign]


def test_a_new_wait_is_found_and_a_superfluous_one_is_told() -> None:
    name = "hooks on a side stream"
    before = edges_of(CASES[name])
    with _a_wait_that_nobody_needs():
        edges = by_edge({name: edges_of(CASES[name])})
        (new,) = set(edges) - set(before)
        (verdict,) = _without_each_edge({new: edges[new]})
        assert verdict == Verdict(str(new), "", "", tried=1)
        (of_place,) = _without_the_marks_of_each_place({new: edges[new]})
        with pytest.raises(AssertionError) as caught:
            _require_all_caught([of_place, verdict])
    assert str(new) == "unit.py:Unit.unshard -> unit.py:Unit.unshard"
    assert str(new) in str(caught.value)
    assert "NOT CAUGHT" in table([verdict])
