"""Bugs of other engines, found on demand: each is one hazard, always the same; the engine has
none.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.simulated.accelerator.device import Hazard, checked, name_range, name_stream
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, one_at_a_time
from tests.simulated.programs.upstream_bugs import (
    BUGS,
    HALF,
    NUMEL,
    WORK,
    Bug,
    CommunicationBufferFreedEarly,
    HookBornOnASideStream,
    ReductionAwaitsTheCurrentStream,
    RefillAwaitsTheFlusher,
    Training,
)

NBYTES, HALF_NBYTES = 4 * NUMEL, 4 * HALF
STEPS = 3


def _name(thing: torch.Tensor | torch.Stream, name: str) -> None:
    if isinstance(thing, torch.Stream):
        name_stream(thing, name)
    else:
        name_range(thing, name)


def _second_step(kind: type[Bug], *, fixed: bool) -> list[Hazard]:
    """Returns the hazards of a second step. In the first the host waits, as it does on a GPU."""
    bug = kind(torch.device("sim", 0), fixed=fixed, made=_name)
    assert bug.step().is_right
    with checked(raises=False) as found:
        assert bug.step().is_right  # the simulated device runs in the order of the program
    return found


# Per bug: kind, bytes, of what; op, stream and function of the use that should have waited, and of
# the first.
_REPORTS = {
    HookBornOnASideStream: (
        ("read-after-write", 0, NBYTES, "bucket"),
        ("aten::mul.out", "reducer", "arrived"),
        ("aten::copy_", "side", "arrived"),
    ),
    ReductionAwaitsTheCurrentStream: (
        ("read-after-write", HALF_NBYTES, NBYTES, "bucket"),
        ("aten::mul.out", "reducer", "reduce"),
        ("aten::copy_", "producer 1", "arrived"),
    ),
    RefillAwaitsTheFlusher: (
        ("write-after-read", 0, HALF_NBYTES, "bucket 0"),
        ("aten::fill_.Scalar", "other producer", "fill"),
        ("aten::mul.out", "reducer", "flush"),
    ),
    CommunicationBufferFreedEarly: (
        ("free-while-in-flight", 0, NBYTES, "buffer"),
        ("free", "default stream of sim:0", "step"),
        ("aten::mul.out", "reducer", "step"),
    ),
}


@pytest.mark.parametrize("kind", BUGS)
def test_each_bug_is_one_hazard_named_exactly(kind: type[Bug]) -> None:
    (hazard,) = _second_step(kind, fixed=False)
    what, later, earlier = _REPORTS[kind]
    assert (hazard.kind, hazard.begin, hazard.end, hazard.labels) == what
    for use, (op, stream, function) in ((hazard.later, later), (hazard.earlier, earlier)):
        assert use.op == op
        assert stream in use.stream
        assert re.fullmatch(rf".*/upstream_bugs\.py:\d+:{kind.__name__}\.{function}", use.place)


@pytest.mark.parametrize("kind", BUGS)
def test_each_bug_is_gone_with_the_wait_that_was_missing(kind: type[Bug]) -> None:
    assert not _second_step(kind, fixed=True)


def _train(kind: type[Bug], replicas: int) -> list[torch.Tensor]:
    """Returns what the engine makes of the weights. Nothing in it makes the host wait before the
    end.
    """
    size = dist.get_world_size()
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    mesh = init_device_mesh("sim", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    with one_at_a_time():
        training = Training(WORK[kind], torch.device("sim", dist.get_rank()), mesh)
    for _ in range(STEPS):
        training.step()
    return training.weights()


def _train_plain(kind: type[Bug]) -> list[torch.Tensor]:
    training = Training(WORK[kind], torch.device("sim", 0))
    for _ in range(STEPS):
        training.step()
    return training.weights()


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", BUGS)
def test_the_engine_does_the_same_work_without_a_hazard_and_right(
    kind: type[Bug], world_size: int, replicas: int
) -> None:
    with checked():
        by_rank = VirtualRanks(world_size).run(_train, kind, replicas)
    expected = _train_plain(kind)
    for weights in by_rank:
        # Every rank has the same batch, and each sum is of two equal numbers, so the average is
        # exact.
        for ours, plain in zip(weights, expected, strict=True):
            assert torch.equal(ours, plain)
