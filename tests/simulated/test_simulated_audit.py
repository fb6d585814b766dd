"""The mutation audit: the engine without one of its waits is caught.

Edges are found by running the programs, so a new one is audited as soon as it is there.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from tests.simulated.accelerator import device
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, on_virtual_ranks
from tests.simulated.programs.audit import edges, is_noticed
from tests.simulated.programs.edges import (
    NOT_IN_THE_MATRIX,
    REPLACEMENTS,
    UPDATES_TOLD_OF,
    Edge,
    watched,
)


@pytest.mark.slow
def test_every_edge_of_the_engine_is_needed_by_a_program() -> None:
    found = edges()
    assert "unit.py" in {edge.recorded.partition(":")[0] for edge in found}
    missed = [
        str(edge)
        for edge, makers in found.items()
        if edge not in NOT_IN_THE_MATRIX and not is_noticed(makers, edge)
    ]
    assert not missed, f"keep a program that notices when these are gone, or delete: {missed}"


class _Fan(nn.Module):
    """Units that read the batch, each in a stream that the caller chooses, which does not wait for
    that of the caller.
    """

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, places: list[torch.Stream]) -> torch.Tensor:
        home, outputs = torch.accelerator.current_stream(), []
        for unit, place in zip(self.units, places, strict=True):
            with place:
                outputs.append(unit(x))
        for place, output in zip(places, outputs, strict=True):
            home.wait_stream(place)
            output.record_stream(home)
        return torch.stack(outputs).sum(0)


@on_virtual_ranks(1, checks=True)
def test_one_rank_reads_a_parameter_after_the_outermost_forward_began_in_any_stream() -> None:
    x = torch.ones(2, 4, device=device.NAME)
    model = _Fan().to(device.NAME)
    for module in (*model.units, model):
        shardgrad.fully_shard(module, mesh=init_device_mesh(device.NAME, (1,)))
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    places = [torch.Stream(device.NAME) for _ in range(2)]
    torch.accelerator.synchronize()
    for _ in range(3):
        model(x, places).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # None would free memory, which streams wait for


def _replaces_a_parameter_that_is_updated_elsewhere(is_told_first: bool) -> None:
    model = nn.Linear(4, 4)
    for param in model.parameters():
        nn.init.ones_(param)
    shardgrad.fully_shard(model, mesh=init_device_mesh(device.NAME, (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side, home = torch.Stream(device.NAME), torch.accelerator.current_stream()
    for _ in range(3):
        model(torch.ones(2, 4, device=device.NAME)).square().mean().backward()
        side.wait_stream(home)
        with side:
            optimizer.step()
            # None would free memory, which streams wait for.
            optimizer.zero_grad(set_to_none=False)
        model.bias = nn.Parameter(torch.ones_like(model.bias))
        if not is_told_first:
            home.wait_stream(side)
            model.float()  # takes it over
        model.set_post_optim_event(side.record_event())
    home.wait_stream(side)


@pytest.mark.parametrize(
    ("is_told_first", "edge"), [(True, UPDATES_TOLD_OF), (False, REPLACEMENTS)]
)
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_parameter_may_be_replaced_while_others_are_updated(
    is_told_first: bool, edge: Edge, is_removed: bool
) -> None:
    with watched(edge if is_removed else None), device.checked(raises=False) as hazards:
        VirtualRanks(2).run(_replaces_a_parameter_that_is_updated_elsewhere, is_told_first)
    assert bool(hazards) is is_removed
