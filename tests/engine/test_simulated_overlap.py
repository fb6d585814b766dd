"""The engine waits for no more than it must: what may overlap, as facts about the launches of one
step.

Two launches may overlap if no stream and no wait orders them, however long each takes. The step is
the third: in the first the host waits for the device, and that orders everything launched later.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad.sharding import zero_copy
from tests.simulated.accelerator import device
from tests.simulated.accelerator.device import Launch
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, one_at_a_time

UNITS = 5
STEPS = 3


class Step:
    """What rank 0 launched in one step of training a chain of units.

    Attributes:
        gathers, computes: of each unit, in the order they ran: forward's from the first unit to the
            last, then backward's from the last to the first. A computation is several launches.
        packs, reductions: of each unit, in the order of backward. A reduction is several launches.
        scatters, all_reduces: the collectives of reductions.
        updates: of the optimizer.
    """

    def __init__(self, launches: list[Launch]) -> None:
        by_op = defaultdict[str, list[Launch]](list)
        self.computes: list[list[Launch]] = []
        self.reductions: list[list[Launch]] = []
        for launch in launches:
            name = launch.op.partition("::")[2]
            by_op[name].append(launch)
            if name == "unpack":
                self.computes.append([])
            elif name == "pack":
                self.reductions.append([])
            elif name in ("reduce_scatter", "all_reduce", "sum_chunks"):
                self.reductions[-1].append(launch)
            elif name in ("addmm.out", "mm.out"):
                self.computes[-1].append(launch)
        self.gathers, self.packs, self.updates = (
            by_op[name] for name in ("all_gather", "pack", "sgd_")
        )
        self.scatters, self.all_reduces = by_op["reduce_scatter"], by_op["all_reduce"]
        assert len(self.computes) == 2 * UNITS
        assert len(self.packs) == len(self.updates) == UNITS
        assert all([*self.computes, *self.reductions])

    @property
    def backward_computes(self) -> list[list[Launch]]:
        """Only those of backward."""
        return self.computes[UNITS:]


def _train(
    replicas: int, most: int | None, begin: threading.Barrier, end: threading.Barrier
) -> None:
    shards = dist.get_world_size() // replicas
    mesh = init_device_mesh("sim", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    with one_at_a_time():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(UNITS))).to("sim")
    for layer in model:
        shardgrad.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    shardgrad.fully_shard(model, mesh=mesh)
    if most is not None:
        model.set_reduce_scatter_max_input_buffers(most)
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to("sim")
    with suppress(RuntimeError):
        model(inputs.T)  # a first forward that fails tells no order
    for step in range(STEPS):
        if step == STEPS - 1:
            begin.wait()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    end.wait()


def _last_step(ranks: int, *, replicas: int = 1, most: int | None = None) -> Step:
    launches: list[Launch] = []
    begin = threading.Barrier(ranks, lambda: device.restart_schedule(keep_launches=True))
    end = threading.Barrier(ranks, lambda: launches.extend(device.launches(0)))
    with device.checked():
        VirtualRanks(ranks).run(_train, replicas, most, begin, end)
    return Step(launches)


Pair = tuple[Launch, Launch]


def ordered(pairs: Iterable[Pair]) -> list[Pair]:
    """Returns those that cannot overlap."""
    return [(one, other) for one, other in pairs if not one.may_overlap(other)]


def test_the_writer_of_a_slot_does_not_wait_for_the_reduction_of_the_slot_before() -> None:
    step = _last_step(2)
    after = zip(step.packs[1:], step.reductions, strict=False)
    assert not ordered((pack, launch) for pack, reduction in after for launch in reduction)


@pytest.mark.parametrize("least", [1, 2**20], ids=["sent from where they are", "packed"])
@pytest.mark.parametrize("most", [None, 1])
def test_backward_of_a_unit_overlaps_the_reduction_of_the_unit_before(
    most: int | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_copy, "ZERO_COPY_NBYTES", least)
    step = _last_step(2, most=most)
    after = zip(step.backward_computes[1:], step.reductions, strict=False)
    assert not ordered(pair for both in after for pair in product(*both))


def test_the_all_gather_of_a_unit_overlaps_the_computation_of_the_unit_before() -> None:
    step = _last_step(2)
    assert len(step.gathers) == 2 * UNITS
    beside = [(i, i + 1) for i in range(2 * UNITS - 1) if i != UNITS - 1]
    # In forward even the gather after that; in backward a reduction lies between, on the group's
    # own stream.
    beside += [(i, i + 2) for i in range(UNITS - 2)]
    assert not ordered(
        (step.gathers[gathered], compute)
        for computed, gathered in beside
        for compute in step.computes[computed]
    )


def test_a_reduce_scatter_does_not_wait_for_the_all_reduce_over_replicas_of_the_unit_before() -> (
    None
):
    step = _last_step(4, replicas=2)
    assert len(step.scatters) == len(step.all_reduces) == UNITS
    assert not ordered(zip(step.scatters[1:], step.all_reduces, strict=False))
    reductions = chain.from_iterable(step.reductions)
    assert all(update.comes_after(launch) for launch, update in product(reductions, step.updates))
