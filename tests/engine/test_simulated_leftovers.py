"""A process that goes on living gets everything back, however training has ended in it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.multiprocessing.reductions import StorageWeakRef

import shardgrad
from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.buffers import Allocate
from shardgrad.engine.unit import units_under
from shardgrad.features.custom_comms import set_collectives
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks
from tests.simulated.programs.graphed import batch, build, loss_of
from tests.support.graphed import step_of
from tests.support.processes import FairClock
from tests.support.traps import Trap, TrapInBackward

DEPTH, STEPS, LIMIT_S = 3, 6, 20
Probe = Callable[[], object]


def train(how: str, offloads: bool, error: type[BaseException]) -> list[Probe]:
    """Trains until something is raised in the last step; returns what tells whether anything is
    left.
    """
    options = {"offload_policy": CPUOffloadPolicy()} if offloads else {}
    model = build(DEPTH, **options)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-2)

    def fail(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if how == "forward":
            raise error
        return TrapInBackward.apply(output)

    taken: Any = step_of(model, optimizer)
    taken = taken if offloads else shardgrad.graphed_step(model, optimizer)(taken)
    for number in range(STEPS - 1):
        taken(batch(number))
    # A shape that was not there before makes the last step a capture, or one that warms up for it.
    last = batch(STEPS, rows=6)
    if how == "success":
        taken(last)
    else:
        model.register_forward_hook(fail)
        with pytest.raises(Trap if how == "backward" else error):
            taken(last)
    assert offloads or taken.captures >= 1
    storages = [
        StorageWeakRef(group.shard.untyped_storage())
        for unit in units_under(model)
        for group in unit.groups
    ]
    assert len(storages) == DEPTH
    things = [model, optimizer, *model.parameters(), dist.group.WORLD]
    return [*map(weakref.ref, things), *(lambda s=s: None if s.expired() else s for s in storages)]


@pytest.mark.parametrize(
    ("how", "error"),
    [("success", Trap), ("forward", Trap), ("backward", Trap), ("forward", KeyboardInterrupt)],
    ids=["success", "error in forward", "error in backward", "Ctrl-C"],
)
@pytest.mark.parametrize("offloads", [False, True], ids=["graphed", "pinned"])
def test_graphs_pinned_memory_and_process_groups_are_gone(
    how: str, error: type[BaseException], offloads: bool
) -> None:
    module = torch.get_device_module(NAME)

    def held() -> list[int]:
        return [module.memory_allocated(index) for index in range(2)]

    gc.collect()
    lines, held_by_others = len(recorder._logs), held()
    probes = [
        probe for found in VirtualRanks(2).run(train, how, offloads, error) for probe in found
    ]

    def left() -> list[object]:
        gc.collect()
        return [thing for probe in probes if (thing := probe()) is not None]

    # Autograd's own threads let go of a backward a moment after it has returned.
    clock = FairClock()
    while left() and clock.elapsed_s() < LIMIT_S:
        time.sleep(0.01)
    if left():
        raise AssertionError(f"still there: {sorted(type(thing).__name__ for thing in left())}")
    assert all(now <= before for now, before in zip(held(), held_by_others, strict=True))
    assert len(recorder._logs) <= lines  # one for each process group that there is
    assert not dist.is_initialized()


def allocator(group: dist.ProcessGroup) -> Allocate:
    return lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8, device=device)


def gather_and_delete() -> None:
    model = build()
    for unit in units_under(model):
        set_collectives(unit.groups, staging=allocator)
    with torch.no_grad():
        loss_of(model, batch(0))


def test_a_model_may_be_deleted_while_what_it_has_gathered_is_read() -> None:
    """Staging of this kind stays with the model from step to step."""
    with checked():
        VirtualRanks(2).run(gather_and_delete)
        gc.collect()
